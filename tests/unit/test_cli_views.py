"""What people see in the terminal: the live view and the table of jobs."""

from __future__ import annotations

from dataclasses import replace
from datetime import timedelta
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

from job_snapshots import START, at, snapshot
from spottrain_api.v1alpha1.status import Condition, Counts, GenerationState, Phase, ProgressStatus, TrainingJobStatus
from spottrain_cli.job_view import JobSnapshot, PodSummary, pod_state
from spottrain_cli.live_view import job_view, loss_text, seconds, sparkline
from spottrain_cli.main import jobs_table
from spottrain_cli.report import html_report


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


def table_of(*jobs: JobSnapshot, width: int) -> list[str]:
    console = Console(file=StringIO(), width=width)
    console.print(jobs_table(jobs, at(20), width))
    assert isinstance(console.file, StringIO)
    return console.file.getvalue().splitlines()


@pytest.mark.parametrize(
    ("width", "columns"),
    [
        (160, ["Step", "Loss", "Tokens/s", "World", "Preempted", "Redone", "Goodput", "Cost", "Age"]),
        (80, ["Step", "Loss", "Cost", "Age"]),
        (60, ["Step", "Loss", "Age"]),
        (40, []),
    ],
)
def test_a_narrow_terminal_leaves_out_columns_and_wraps_none(width: int, columns: list[str]) -> None:
    known = snapshot()
    progress = known.status.progress.model_copy(update={"display": "1200/20000"})
    job = replace(known, name="my-long-experiment", status=known.status.model_copy(update={"progress": progress}))
    starting = replace(job, status=TrainingJobStatus(phase=Phase.RECOVERING))
    header, first, second = table_of(job, starting, width=width)
    assert header.split() == ["Job", "Phase", *columns]
    assert "my-long-experiment  Running" in first
    assert "my-long-experiment  Recovering" in second
    assert not columns or "1200/20000" in first
    assert "…" not in header + first + second


@pytest.mark.parametrize(("age", "told"), [(5, False), (20, True)], ids=["just created", "old"])
def test_a_job_that_no_operator_has_looked_at_says_what_to_check(age: float, told: bool) -> None:
    new = replace(snapshot(), created_at=at(20 - age), status=TrainingJobStatus())
    said = "No operator has looked at default/gpt yet. Its pod has to be ready: `kubectl get pods -A -l"
    assert (said in " ".join(shown(new).split())) == told
    assert (said in " ".join(" ".join(table_of(new, width=120)).split())) == told
    assert "No operator" not in shown() + " ".join(table_of(snapshot(), width=120))


def test_a_narrow_terminal_keeps_figures_on_their_lines() -> None:
    job = snapshot()
    progress = job.status.progress.model_copy(
        update={"display": "130/1000", "tokens_per_second": 123_456.7, "eta_seconds": 7500.0}
    )
    job = replace(job, status=job.status.model_copy(update={"progress": progress}))
    console = Console(file=StringIO(), width=80)
    console.print(job_view(job, at(20), [1.0, 2.0] * 20))
    assert isinstance(console.file, StringIO)
    lines = [" ".join(line.split()) for line in console.file.getvalue().splitlines()]
    assert [line.rpartition("━ ")[2] for line in lines if line.startswith("Step")] == ["130/1000 2h05m to go"]
    assert f"Loss {'▁█' * 20} 1.2500 123,457 tokens/s" in lines
    assert any(line.endswith("0 steps redone, 0 failures") for line in lines)


def test_the_table_has_namespaces_if_there_are_several() -> None:
    here, there = snapshot(), replace(snapshot(), namespace="research", name="bert")
    one = table_of(here, width=160)[0].split()
    header, *rows = [line.split() for line in table_of(here, there, width=160)]
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


@pytest.mark.parametrize(
    ("capacity", "said"),
    [
        ({}, "no prices given"),
        ({"spot": {"max": 2}, "pools": [{"name": "a"}]}, "no prices given"),
        ({"spot": {"pricePerHour": 0}}, "none so far"),
        ({"onDemand": {"pricePerHour": 3.5}}, "none so far"),
        ({"pools": [{"name": "a"}, {"name": "b", "pricePerHour": 0.92}]}, "none so far"),
    ],
)
def test_the_cost_of_a_job_that_has_paid_nothing_yet(capacity: dict[str, Any], said: str) -> None:
    """The operator writes none while its pods wait for nodes, and if they are free."""
    job = snapshot()
    unpaid = replace(
        job, spec={**job.spec, "capacity": capacity}, status=job.status.model_copy(update={"cost": None})
    )
    [line] = [line for line in shown(unpaid).splitlines() if line.startswith("Cost")]
    assert said in line


@pytest.mark.parametrize(
    ("slack", "reason", "said"),
    [
        (None, None, "not known yet"),
        (4000.0, "SlackLeft", "1h06m to lose"),
        (-90.0, "DeadlineOutOfReach", "1m30s late"),
    ],
)
def test_a_job_with_a_deadline_shows_the_time_that_it_can_lose(
    slack: float | None, reason: str | None, said: str
) -> None:
    job = snapshot()
    truth = "False" if slack is not None and slack < 0 else "True"
    on_time = Condition(
        type="OnTime", status=truth, reason=reason or "", message="It may be late.", last_transition_time=START
    )
    status = job.status.model_copy(update={"slack_seconds": slack, "conditions": (on_time,) if reason else ()})
    text = shown(replace(job, spec={"capacity": {"finishBy": "2026-12-24T18:00:00Z"}}, status=status))
    [line] = [each for each in text.splitlines() if each.startswith("Deadline")]
    assert "2026-12-24T18:00:00Z" in line
    assert said in line
    assert ("It may be late." in text) == (truth == "False")
    assert "Deadline" not in shown(job)


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
    job = snapshot()
    ready = job.status.model_copy(update={"members": Counts(world_size=1, spot=1, waiting=1)})
    lines = [line.split() for line in shown(replace(job, status=ready)).splitlines() if "gpt-" in line]
    assert lines[0][:2] == ["0", "gpt-1"]
    assert any(line[0] == "gpt-3" and "warm" in line for line in lines)
    assert any(line[0] == "gpt-2" and "Pending" in line for line in lines)


def test_a_pod_that_loads_torch_is_not_called_warm() -> None:
    [line] = [line for line in shown().splitlines() if "gpt-3" in line]
    assert line.rstrip().endswith("starts or waits")


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
    stopped = replace(over, pods=(replace(one, state="Succeeded"),))
    assert next(line for line in shown(stopped).splitlines() if "gpt-1" in line).split()[-1] == "Stopped"
    assert [(line[0], " ".join(line[-5:])) for line in lines[1:]] == [
        ("gpt-2", "Failed, not in generation 3"),
        ("gpt-3", "Succeeded, not in generation 3"),
    ]


def test_a_pod_that_waits_for_the_next_generation_has_no_rank() -> None:
    job = snapshot()
    assert job.status.generation is not None
    ended = job.status.generation.model_copy(update={"state": GenerationState.ENDED})
    counts = Counts(waiting=2)
    between = job.status.model_copy(update={"phase": Phase.RECOVERING, "generation": ended, "members": counts})
    [line] = [line.split() for line in shown(replace(job, status=between)).splitlines() if "gpt-1" in line]
    assert line[0] == "gpt-1"
    assert line[-1] == "warm"


@pytest.mark.parametrize("loss", [1e300, -1.7976931348623157e308])
def test_a_loss_that_has_diverged_has_few_digits_everywhere(loss: float) -> None:
    job = snapshot()
    points = tuple(replace(point, loss=loss if i % 2 else -loss) for i, point in enumerate(job.history))
    progress = job.status.progress.model_copy(update={"loss": loss})
    job = replace(job, history=points, status=job.status.model_copy(update={"progress": progress}))
    short = loss_text(loss)
    assert len(short) <= 11
    assert short in shown(job)
    assert short in "".join(table_of(job, width=160))
    assert short in html_report(job, at(20))


def test_small_things() -> None:
    assert sparkline([1.7e308, -1.7e308, 0.0]) == "█▁▅"
    assert sparkline([0.0, 5e-324]) == "▁▁"
    assert [loss_text(loss) for loss in (0.0, -1.25, 999_999.0, 1e6, 2.0**63)] == [
        *("0.0000", "-1.2500", "999999.0000", "1e+06", "9.223e+18")
    ]
    assert [loss_text(loss) for loss in (0.1, 0.0123456, -1.4e-4, 3.2154e-5, 5e-324)] == [
        *("0.1000", "0.012346", "-0.00014", "3.2154e-05", "4.9407e-324")
    ]
    assert sparkline([]) == ""
    assert sparkline([1.0, 1.0]) == "▁▁"
    assert sparkline([0.0, 1.0]) == "▁█"
    assert [seconds(value) for value in (5, 185, 7800)] == ["5s", "3m05s", "2h10m"]


def test_throughput_is_that_of_a_generation_that_trains() -> None:
    job = snapshot()
    assert job.status.generation is not None
    ended = job.status.generation.model_copy(update={"state": GenerationState.ENDED})
    stands_still = job.status.progress.model_copy(update={"last_step_at": at(-161)})
    for changed in ({"generation": None}, {"generation": ended}, {"progress": stands_still}):
        other = replace(job, status=job.status.model_copy(update=changed))
        assert "tokens/s" not in shown(other)
        assert "1,000" not in " ".join(table_of(other, width=160))
    assert "1,000 tokens/s" in shown(job)
    assert "1,000" in " ".join(table_of(job, width=160))


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
    assert "last step" not in after_step(300)
    assert "last step 5m01s ago" in after_step(301)
    assert "try a higher num_workers" in after_step(300)
    assert "to go" not in after_step(301)
    assert "waiting" not in after_step(301)


def test_a_standstill_of_quick_steps_shows_after_three_minutes() -> None:
    job = snapshot()
    progress = job.status.progress.model_copy(update={"eta_seconds": 70.0, "last_step_at": at(-160)})
    trains = replace(job, status=job.status.model_copy(update={"progress": progress}))
    assert "1m10s to go" in shown(trains), "the status may be 165 s old"
    stands_still = progress.model_copy(update={"last_step_at": at(-161)})
    text = shown(replace(job, status=job.status.model_copy(update={"progress": stands_still})))
    assert "30/100, last step 3m01s ago" in text
    assert "to go" not in text


@pytest.mark.parametrize(("resumed", "advises"), [(0, True), (10, True), (11, False)])
def test_the_first_steps_of_a_generation_give_no_advice_about_data(resumed: int, advises: bool) -> None:
    job = snapshot()
    assert job.status.generation is not None
    assert job.status.commit is not None
    commit = job.status.commit.model_copy(update={"step": resumed})
    generation = job.status.generation.model_copy(update={"resume": commit})
    text = shown(replace(job, status=job.status.model_copy(update={"generation": generation})))
    assert "48% of each step is spent waiting" in text
    assert ("try a higher num_workers" in text) == advises


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
