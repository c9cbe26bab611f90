"""What people see: the live view and the report, from a snapshot."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from functools import partial
from io import StringIO
from typing import Any

import pytest
from kubernetes.client import (
    V1ContainerState,
    V1ContainerStateRunning,
    V1ContainerStatus,
    V1ObjectMeta,
    V1Pod,
    V1PodStatus,
)
from rich.console import Console

from spottrain_api.contract import CapacityType, CommitRef, Member, MemoryEstimate, StrategyChoice
from spottrain_api.history import HistoryPoint
from spottrain_api.v1alpha1 import (
    Condition,
    CostStatus,
    Counts,
    GenerationState,
    GenerationStatus,
    Phase,
    ProgressStatus,
    TimeStatus,
    TrainingJobStatus,
    Transition,
)
from spottrain_cli.job_view import EventSummary, JobSnapshot, PodSummary, pod_state
from spottrain_cli.live_view import job_view, seconds, sparkline
from spottrain_cli.main import jobs_table
from spottrain_cli.pictures import TimeAxis, generations_by_step, loss_lines, phase_spans, time_by_phase
from spottrain_cli.report import html_report, outcome
from spottrain_cli.throughput import throughput

START = datetime(2026, 1, 1, tzinfo=UTC)
SPEC = {"batch": {"global": 8}}


def at(offset: float) -> datetime:
    return START + timedelta(seconds=offset)


def history_point(offset: float, step: int, phase: Phase, generation: int = 1, spot: int = 4) -> HistoryPoint:
    return HistoryPoint(
        at=at(offset).timestamp(),
        step=step,
        loss=5.0 / (step + 1) if step else math.nan,
        tokens_per_second=1000.0,
        generation=generation,
        on_demand=2,
        spot=spot,
        committed_step=0,
        phase=phase.value,
    )


def snapshot() -> JobSnapshot:
    member = Member(
        pod="gpt-1", pod_uid="u", address="127.1.0.2", node="spot-1", node_rank=0, capacity_type=CapacityType.SPOT
    )
    status = TrainingJobStatus(
        phase=Phase.RUNNING,
        message="1 member trains <b>well</b>.",
        generation=GenerationStatus(
            number=3,
            state=GenerationState.ACTIVE,
            rendezvous_id="r",
            rendezvous_endpoint="127.1.0.2:1",
            world_size=1,
            members=(member,),
            started_at=START,
        ),
        progress=ProgressStatus(
            step=30, total_steps=100, display="30/100", loss=1.25, tokens_per_second=1000, data_wait_ratio=0.48
        ),
        commit=CommitRef(generation=2, step=25, manifest="m", committed_at=START),
        transitions=(
            Transition(
                generation=2,
                reason="Preempted",
                message="node spot-2 goes",
                at=at(10),
                last_step=25,
                steps_redone=0,
                seconds_without_step=4.25,
                world_size_before=2,
                world_size_after=1,
            ),
        ),
        strategy=StrategyChoice(
            strategy="fsdp",
            name="fsdp",
            reason="ddp would need 40.0 GiB.",
            memory=MemoryEstimate(
                total=7 << 30, available=8 << 30, parameters=1, gradients=1, optimizer=2, activations=3, working=0
            ),
        ),
        conditions=(
            Condition(
                type="CheckpointsHealthy",
                status="False",
                reason="CheckpointStorageFull",
                message="The disk is full.",
                last_transition_time=START,
            ),
        ),
        members=Counts(world_size=1, spot=1),
        preemptions=1,
        goodput_display="92%",
        cost=CostStatus(total=0.5, on_demand_only=2.0, currency="EUR", display="0.50 EUR of 2.00"),
    )
    return JobSnapshot(
        namespace="default",
        name="gpt",
        spec=SPEC,
        created_at=START,
        status=status,
        pods=(
            PodSummary(name="gpt-1", node="spot-1", capacity_type="spot", state="Running"),
            PodSummary(name="gpt-2", node="", capacity_type="on-demand", state="Pending"),
            PodSummary(name="gpt-3", node="od-1", capacity_type="on-demand", state="Running"),
        ),
        events=(EventSummary(at=at(10), type="Warning", reason="Preempted", message="node spot-2 goes in 30 s"),),
        history=(
            history_point(5, 0, Phase.STARTING),
            history_point(8, 1, Phase.RUNNING),
            history_point(10, 25, Phase.DRAINING),
            history_point(12, 25, Phase.STARTING, generation=3, spot=0),
            history_point(14, 30, Phase.RUNNING, generation=3, spot=1),
        ),
    )


def shown(job: JobSnapshot | None = None, width: int = 120) -> str:
    console = Console(file=StringIO(), width=width)
    console.print(job_view(job or snapshot(), at(20), [3.0, 2.0, 1.25]))
    file = console.file
    assert isinstance(file, StringIO)
    return file.getvalue()


def test_the_live_view_says_what_matters() -> None:
    text = shown()
    for part in (
        "Running",
        "30/100",
        "1.2500",
        "48% of each step",
        "generation 3",
        "step 25 of generation 2",
        "0.50 EUR",
        "92%",
    ):
        assert part in text
    assert "node spot-2 goes in 30 s" in text
    assert "7.0 GiB a rank" in text
    assert "The disk is full." in text
    assert "ddp would need 40.0 GiB." in text


def test_a_narrow_terminal_cuts_no_name_and_no_phase() -> None:
    node = "ip-10-0-112-233.eu-west-1.compute.internal"
    pods = (PodSummary(name="my-long-experiment-1", node=node, capacity_type="on-demand", state="Running"),)
    view = shown(replace(snapshot(), pods=pods), width=80)
    assert "…" not in view
    job = replace(snapshot(), name="my-long-experiment", status=TrainingJobStatus(phase=Phase.RECOVERING))
    console = Console(file=StringIO(), width=80)
    console.print(jobs_table([job], at(20)))
    assert isinstance(console.file, StringIO)
    assert "my-long-experiment  Recovering" in console.file.getvalue()
    assert "…" not in console.file.getvalue()


def test_the_table_has_namespaces_if_there_are_several() -> None:
    here, there = snapshot(), replace(snapshot(), namespace="research", name="bert")
    console = Console(file=StringIO(), width=160)
    console.print(jobs_table([here], at(20)))
    console.print(jobs_table([here, there], at(20)))
    assert isinstance(console.file, StringIO)
    one, _, header, *rows = [line.split() for line in console.file.getvalue().splitlines()]
    assert one[:2] == ["Job", "Phase"]
    assert header[:3] == ["Namespace", "Job", "Phase"]
    assert [row[:2] for row in rows] == [["default", "gpt"], ["research", "bert"]]
    assert rows[0][4:7] == ["1.2500", "1,000", "1"]  # loss, tokens a second, world size


def test_counts_agree_with_their_nouns() -> None:
    job = snapshot()
    one = job.status.model_copy(update={"steps_redone": 1, "failures": 1, "progress": ProgressStatus(step=26)})
    text, page = shown(job=replace(job, status=one)), html_report(replace(job, status=one), at(20))
    assert "1 preemption (0 without notice)" in text
    assert "1 step redone, 1 failure" in " ".join(text.split())
    assert "1 step since" in text
    assert "<b>1</b><span>preemption</span>" in page
    assert "<b>1</b><span>step redone</span>" in page
    assert "5 steps since" in shown()


def test_of_a_new_job_the_live_view_says_what_is_not_there_yet() -> None:
    text = shown(replace(snapshot(), status=TrainingJobStatus(), pods=(), events=()))
    for part in ("Pending", "waiting for the first step", "none yet", "no prices given", "no generation yet"):
        assert part in text
    assert not [part for part in ("Loss ", "Data", "Strategy", "Note", "goodput") if part in text]


def test_once_a_generation_has_ended_its_pods_are_no_members_and_what_it_said_stays() -> None:
    job = snapshot()
    assert job.status.generation is not None
    generation = job.status.generation.model_copy(update={"state": GenerationState.ENDED})
    progress = job.status.progress.model_copy(
        update={"checkpoint_interval": "every 90 s", "message": "Steps wait for data."}
    )
    text = shown(replace(job, status=job.status.model_copy(update={"generation": generation, "progress": progress})))
    assert "generation 3, Ended" in text
    assert "world size" not in text
    assert "every 90 s" in text
    assert "Steps wait for data." in text


def test_members_come_first_and_others_wait() -> None:
    lines = [line.split() for line in shown().splitlines() if "gpt-" in line]
    assert lines[0][:2] == ["0", "gpt-1"]
    assert any(line[0] == "gpt-3" and "warm" in line for line in lines)
    assert any(line[0] == "gpt-2" and "Pending" in line for line in lines)


def test_pods_of_a_job_that_is_over_wait_for_nothing() -> None:
    job = snapshot()
    text = shown(replace(job, status=job.status.model_copy(update={"phase": Phase.SUCCEEDED, "generation": None})))
    assert "warm" not in text
    assert any(line.split()[-1] == "Running" for line in text.splitlines() if "gpt-3" in line)


def test_pods_that_have_ended_keep_their_rank() -> None:
    job = snapshot()
    assert job.status.generation is not None
    ended = job.status.generation.model_copy(update={"state": GenerationState.ENDED})
    one, two, three = job.pods
    over = replace(
        job,
        status=job.status.model_copy(update={"phase": Phase.FAILED, "generation": ended}),
        pods=(replace(one, state="Failed"), replace(two, state="Failed"), replace(three, state="Succeeded")),
    )
    lines = [line.split() for line in shown(over).splitlines() if "gpt-" in line]
    assert (lines[0][:2], lines[0][-1]) == (["0", "gpt-1"], "Failed")
    assert [(line[0], " ".join(line[-5:])) for line in lines[1:]] == [
        ("gpt-2", "Failed, not in generation 3"),
        ("gpt-3", "Succeeded, not in generation 3"),
    ]


def test_a_pod_that_waits_for_the_next_generation_has_no_rank() -> None:
    job = snapshot()
    assert job.status.generation is not None
    ended = job.status.generation.model_copy(update={"state": GenerationState.ENDED})
    between = job.status.model_copy(update={"phase": Phase.RECOVERING, "generation": ended})
    [line] = [line.split() for line in shown(replace(job, status=between)).splitlines() if "gpt-1" in line]
    assert line[0] == "gpt-1"
    assert line[-1] == "warm"


def test_the_report_is_one_file_and_escapes_what_it_shows() -> None:
    page = html_report(snapshot(), at(20))
    assert page.count("<svg") == 5
    assert "src=" not in page
    assert "&lt;b&gt;well" in page
    assert "4.2" in page
    assert "75%" in page
    assert "0.5000 EUR" in page
    assert "2.00 EUR" in page


def test_the_report_says_what_time_and_money_went_into() -> None:
    spent = TimeStatus(
        until=at(20), productive_seconds=12.0, restart_seconds=4.0, suspended_seconds=4.0, redone_seconds=0.0001
    )
    job = snapshot()
    page = html_report(replace(job, status=job.status.model_copy(update={"time": spent})), at(20))
    rows = [re.findall(r">([^<]+)</td>", "<td>" + row.split("</tr>")[0]) for row in page.split("<tr><td>")[1:4]]
    assert rows[0] == ["Lasting steps", "12s", "60.0%", "0.3750 EUR"]
    assert rows[1][1:] == ["4s", "20.0%", "0.1250 EUR"]
    assert rows[2] == ["Suspended", "4s", "20.0%", "0.0000 EUR"]
    assert "made again" not in page
    assert "What time and money went into" not in html_report(job, at(20))


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"with_notice": True, "resume_step": 25}, "notice in time, resumed from the commit of step 25"),
        (
            {"with_notice": True, "resume_step": 9, "steps_redone": 5},
            "notice too late, resumed from the commit of step 9",
        ),
        ({"resume_step": 24, "from_replicas": True}, "resumed from the members' memory of step 24"),
        ({}, "no later generation has made a step"),
    ],
)
def test_what_came_of_a_change(changes: dict[str, Any], said: str) -> None:
    assert outcome(Transition(generation=1, reason="Preempted", at=START, last_step=25, **changes)) == said


def test_the_report_says_how_fast_the_job_trained() -> None:
    # 1,000 tokens/s in the 2 of 20 seconds from one point of a generation that trains to the next.
    page = html_report(snapshot(), at(20))
    assert "<b>1,000</b><span>tokens/s while training</span>" in page
    assert "1,000 on average while the job trained (the dashed line), 100 over its whole time" in page


def without_tokens(points: Sequence[HistoryPoint]) -> list[HistoryPoint]:
    return [replace(point, tokens_per_second=0.0) for point in points]


def test_throughput_is_in_samples_where_the_script_names_no_tokens() -> None:
    speed = throughput(without_tokens(snapshot().history), 8)
    assert speed.unit == "samples"
    assert [(s.begin - START.timestamp(), s.rate) for s in speed.stretches] == [(8.0, (25 - 1) * 8 / 2)]


def test_throughput_leaves_out_the_time_between_generations() -> None:
    points = [
        history_point(0, 10, Phase.RUNNING),
        history_point(2, 20, Phase.RUNNING),
        history_point(4, 30, Phase.RUNNING),
        history_point(9, 21, Phase.RUNNING, generation=2),
        history_point(10, 22, Phase.RUNNING, generation=2),
    ]
    speed = throughput(without_tokens(points), 3)
    assert [(s.end - s.begin, s.rate) for s in speed.stretches] == [(2.0, 15.0), (2.0, 15.0), (1.0, 3.0)]
    assert speed.mean == pytest.approx((30 + 30 + 3) / 5)
    joined = throughput(without_tokens(points), 3, shortest=3.0).stretches
    assert [(s.end - s.begin, s.rate) for s in joined] == [(4.0, 15.0), (1.0, 3.0)]
    assert throughput([], 3).mean == 0.0
    short = throughput(without_tokens(points), 3, shortest=9.0).stretches  # never over two generations
    assert [(s.generation, s.end - s.begin) for s in short] == [(1, 4.0), (2, 1.0)]


def test_throughput_is_never_less_than_nothing_nor_of_no_time() -> None:
    """A rollback takes steps back in a generation; two records may be of one moment."""
    points = [history_point(at, step, Phase.RUNNING) for at, step in ((0, 10), (2, 20), (2, 20), (4, 15), (6, 25))]
    speed = throughput(without_tokens(points), 3)
    assert [(s.end - s.begin, s.rate) for s in speed.stretches] == [(2.0, 15.0), (2.0, 0.0), (2.0, 15.0)]


def test_the_report_says_how_many_samples_a_job_without_tokens_trained() -> None:
    page = html_report(replace(snapshot(), history=tuple(without_tokens(snapshot().history))), at(20))
    assert "<b>96</b><span>samples/s while training</span>" in page


def test_a_job_without_a_history_has_a_report() -> None:
    job = JobSnapshot(namespace="d", name="j", spec=SPEC, created_at=START, status=TrainingJobStatus())
    assert "one generation" in html_report(job, at(5))


def test_the_time_is_shared_out_without_gaps() -> None:
    spans = phase_spans(snapshot().history, START.timestamp(), at(20).timestamp())
    assert [end for _, _, end in spans[:-1]] == [begin for _, begin, _ in spans[1:]]
    totals = time_by_phase(snapshot().history, START.timestamp(), at(20).timestamp())
    assert totals == {"Running": 8.0, "Pending": 5.0, "Starting": 5.0, "Draining": 2.0}


def test_steps_that_were_done_again_are_a_line_of_their_own() -> None:
    steps = [1, 2, 3, 4, 5, 3, 4, 5, 6]
    points = [history_point(float(at), step, Phase.RUNNING) for at, step in enumerate(steps)]
    (before, again), (after, none) = loss_lines(points)
    assert [step for step, _ in before] == [1, 2]
    assert [step for step, _ in again] == [2, 3, 4, 5]
    assert [step for step, _ in after] == [3, 4, 5, 6]
    assert none == []


def test_generations_that_resumed_from_the_same_step_share_a_label() -> None:
    transition = partial(Transition, at=START, reason="Preempted", with_notice=True, last_step=0)
    numbered = [transition(generation=number, resume_step=step) for number, step in ((1, 15), (2, 15), (3, 77))]
    pending = transition(generation=4)
    assert generations_by_step([*numbered, pending]) == {15: [2, 3], 77: [4]}


@pytest.mark.parametrize(("seconds_after", "shown"), [(300, 300.0), (3600, 60.0), (36_000, 10.0)])
def test_the_time_of_a_job_has_a_unit_that_suits_it(seconds_after: float, shown: float) -> None:
    assert TimeAxis(start=5.0, end=5.0 + seconds_after).at(5.0 + seconds_after) == shown


def test_small_things() -> None:
    assert sparkline([]) == ""
    assert sparkline([1.0, 1.0]) == "▁▁"
    assert sparkline([0.0, 1.0]) == "▁█"
    assert [seconds(value) for value in (5, 185, 7800)] == ["5s", "3m05s", "2h10m"]


@pytest.mark.parametrize("phase", [Phase.FAILED, Phase.SUCCEEDED, Phase.SUSPENDED])
def test_of_a_job_that_does_not_train_no_remaining_time_is_shown(phase: Phase) -> None:
    job = snapshot()
    progress = job.status.progress.model_copy(update={"eta_seconds": 54.0})
    running = replace(job, status=job.status.model_copy(update={"progress": progress}))
    assert "54s to go" in shown(running)
    assert "to go" not in shown(replace(job, status=running.status.model_copy(update={"phase": phase})))


def test_of_a_job_that_hangs_no_remaining_time_is_shown() -> None:
    job = snapshot()
    progress = job.status.progress.model_copy(
        update={"step": 90, "total_steps": 100, "eta_seconds": 600.0, "data_wait_ratio": 0.19, "last_step_at": START}
    )
    job = replace(job, status=job.status.model_copy(update={"progress": progress}))

    def after_step(seconds: int) -> str:
        console = Console(width=120, record=True, file=StringIO())
        console.print(job_view(job, START + timedelta(seconds=seconds)))
        return console.export_text()

    assert "10m00s to go" in after_step(300), "a step takes a minute"
    assert "try a higher num_workers" in after_step(300)
    assert "to go" not in after_step(301)
    assert "waiting" not in after_step(301)


def test_a_job_that_is_over_waits_for_no_first_step() -> None:
    text = shown(replace(snapshot(), status=TrainingJobStatus(phase=Phase.FAILED)))
    assert "no step made" in text
    assert "waiting for the first step" not in text


@pytest.mark.parametrize(("ready", "state"), [(False, "Starting"), (True, "Running")])
def test_a_pod_whose_agent_still_loads_torch_starts(ready: bool, state: str) -> None:
    container = V1ContainerStatus(
        name="trainer",
        image="i",
        image_id="i",
        ready=ready,
        restart_count=0,
        state=V1ContainerState(running=V1ContainerStateRunning()),
    )
    pod = V1Pod(metadata=V1ObjectMeta(), status=V1PodStatus(phase="Running", container_statuses=[container]))
    assert pod_state(pod) == state
