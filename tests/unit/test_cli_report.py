"""The report of a job: time, money, throughput and pictures, from a snapshot."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import replace
from datetime import date
from functools import partial
from typing import Any

import pytest

from job_snapshots import SPEC, START, at, history_point, snapshot
from spottrain_api.history import MAX_POINTS, HistoryPoint
from spottrain_api.v1alpha1.spending import CauseCost, CostStatus, PoolCost, TimeStatus
from spottrain_api.v1alpha1.status import Phase, TrainingJobStatus, Transition
from spottrain_cli.job_view import JobSnapshot
from spottrain_cli.live_view import money
from spottrain_cli.pictures import TimeAxis, generations_by_step, loss_lines, phase_spans, time_by_phase
from spottrain_cli.report import html_report, outcome
from spottrain_cli.throughput import throughput


def test_the_report_is_one_file_and_escapes_what_it_shows() -> None:
    page = html_report(snapshot(), at(20))
    assert page.count("<svg") == 5
    assert "src=" not in page
    assert "&lt;b&gt;well" in page
    assert "4.2" in page
    assert "75%" in page
    assert "0.5000 EUR" in page
    assert "2.00 EUR" in page


def test_the_cost_is_not_compared_with_on_demand_nodes_of_no_price() -> None:
    job = snapshot()
    assert "with on-demand nodes alone" in html_report(job, at(20))
    cost = CostStatus(total=0.5, currency="EUR")
    page = html_report(replace(job, status=job.status.model_copy(update={"cost": cost})), at(20))
    assert "0.5000 EUR" in page
    assert "with on-demand nodes alone" not in page
    assert "saved" not in page


def test_the_report_says_what_the_time_went_into() -> None:
    spent = TimeStatus(
        until=at(20), productive_seconds=12.0, restart_seconds=4.0, suspended_seconds=4.0, redone_seconds=0.0001
    )
    job = snapshot()
    rows = table(replace(job, status=job.status.model_copy(update={"time": spent})), "What the time went into")
    assert rows[0] == ["Lasting steps", "12s", "60.0%"]
    assert rows[1][1:] == ["4s", "20.0%"]
    assert rows[2] == ["Suspended", "4s", "20.0%"]
    assert len(rows) == 3, "what is less than a tenth of a thousandth is left out"
    assert "What the time went into" not in html_report(job, at(20))


def test_the_report_says_what_the_money_went_into() -> None:
    """The parts add up to the cost, also if a part was recorded without a cause."""
    causes = (CauseCost(cause="Training", total=0.6), CauseCost(cause="Fallback", total=0.15))
    pools = (PoolCost(capacity_type="spot", total=1.0),)
    job = snapshot()
    status = job.status.model_copy(update={"cost": CostStatus(total=1.0, currency="EUR", causes=causes, pools=pools)})
    assert table(replace(job, status=status), "What the money went into") == [
        ["Steps", "0.6000 EUR", "60.0%"],
        ["Before causes were recorded", "0.2500 EUR", "25.0%"],
        ["What on-demand nodes cost more than the spot nodes for which they stood in", "0.1500 EUR", "15.0%"],
    ]


def table(job: JobSnapshot, title: str) -> list[list[str]]:
    section = html_report(job, at(20)).split(f"<h2>{title}</h2>")[1].split("</table>")[0]
    return [re.findall(r">([^<]+)</td>", row) for row in section.split("<tr>")[2:]]


def tiles(page: str) -> dict[str, str]:
    found = re.findall(r'<div class="tile"><b>([^<]*)</b><span>([^<]*)</span>', page)
    return {name: value for value, name in found}


def test_the_report_says_what_a_million_lasting_tokens_cost() -> None:
    job = snapshot()
    made = throughput(job.history, 8).amount
    assert made > 0
    assert tiles(html_report(job, at(20)))["a million tokens, about"] == money(0.5 / made * 1e6, "EUR")
    half_redone = TimeStatus(until=at(20), productive_seconds=5.0, redone_seconds=5.0)
    lossy = replace(job, status=job.status.model_copy(update={"time": half_redone}))
    assert tiles(html_report(lossy, at(20)))["a million tokens, about"] == money(1.0 / made * 1e6, "EUR")
    silent = replace(job, history=tuple(without_tokens(job.history)))
    assert "a million tokens, about" not in tiles(html_report(silent, at(20)))


def test_the_report_says_of_when_its_list_prices_are() -> None:
    job = snapshot()
    assert job.status.cost is not None
    assert "list prices of" not in tiles(html_report(job, at(20)))
    listed = job.status.cost.model_copy(update={"list_prices_of": date(2025, 12, 1)})
    page = html_report(replace(job, status=job.status.model_copy(update={"cost": listed})), at(20))
    assert tiles(page)["list prices of"] == "2025-12-01"


def test_the_report_compares_the_cost_with_that_of_on_demand_nodes_if_their_price_is_known() -> None:
    job = snapshot()
    assert job.status.cost is not None
    assert "with on-demand nodes alone" in html_report(job, at(20))
    unknown = job.status.cost.model_copy(update={"on_demand_only": 0.0})
    page = html_report(replace(job, status=job.status.model_copy(update={"cost": unknown})), at(20))
    assert "0.5000 EUR" in page
    assert "with on-demand nodes alone" not in page


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


@pytest.mark.parametrize("now", [-2400, 0], ids=["behind the start", "at the start"])
def test_a_clock_behind_the_clusters_leaves_the_report_with_the_time_that_is_known(now: float) -> None:
    """The newest point is of 14 s after the start."""
    page = html_report(snapshot(), at(now))
    assert "took 14s" in page
    assert "(the dashed line), 143 over its whole time" in page
    assert "took 1s" in html_report(replace(snapshot(), history=()), at(now))


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
        history_point(4, 30, Phase.DRAINING),
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


def test_throughput_covers_generations_whose_points_between_them_are_thinned_out() -> None:
    points = [
        history_point(0, 10, Phase.RUNNING),
        history_point(100, 30, Phase.RUNNING, generation=3),
        history_point(200, 50, Phase.STARTING, generation=5),
        history_point(210, 50, Phase.RUNNING, generation=5),
        history_point(300, 70, Phase.RUNNING, generation=5),
    ]
    assert throughput(points, 8).amount == 1000.0 * (200 + 90)


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
    page = html_report(job, at(5))
    assert "created 2026-01-01 00:00:00 UTC · took 5s" in page
    assert "No generation has started." in page
    started = replace(job, status=TrainingJobStatus(start_time=at(2)))
    assert "None: one generation from the start to the end." in html_report(started, at(5))


def test_the_time_is_shared_out_without_gaps() -> None:
    spans = phase_spans(snapshot().history, START.timestamp(), at(20).timestamp())
    assert [end for _, _, end in spans[:-1]] == [begin for _, begin, _ in spans[1:]]
    totals = time_by_phase(snapshot().history, START.timestamp(), at(20).timestamp())
    assert totals == {"Running": 8.0, "Pending": 5.0, "Starting": 5.0, "Draining": 2.0}


def test_the_time_before_a_history_that_begins_late_is_not_recorded() -> None:
    """It knows 10 seconds, with 1,000 tokens/s in 4 of them."""
    job = replace(snapshot(), history=snapshot().history[2:])
    assert time_by_phase(job.history, START.timestamp(), at(20).timestamp()) == {
        "not recorded": 10.0,
        "Running": 6.0,
        "Draining": 2.0,
        "Starting": 2.0,
    }
    later = replace(job, history=(*job.history, history_point(18, 50, Phase.RUNNING, generation=3)))
    page = html_report(later, at(20))
    assert "(the dashed line), 400 over the time that is recorded." in page
    assert "not recorded 10s" in page


@pytest.mark.parametrize(("number", "says"), [(MAX_POINTS - 1, False), (MAX_POINTS, True)])
def test_the_report_says_if_its_history_is_thinned_out(number: int, says: bool) -> None:
    history = tuple(history_point(float(second), second, Phase.RUNNING) for second in range(number))
    page = html_report(replace(snapshot(), history=history), at(number))
    assert ("some of its shortest phases count for the phase before them" in page) == says


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
    status = snapshot().status.model_copy(update={"transitions": (*numbered, pending)})
    assert generations_by_step(status) == {15: [2, 3], 77: [4]}


def test_a_generation_whose_number_skips_some_has_its_own_label() -> None:
    """An earlier job at the same folder left generations up to 37."""
    transition = partial(Transition, at=START, reason="EarlierJob", last_step=0)
    known = snapshot().status
    assert known.generation is not None
    newest = known.generation.model_copy(update={"number": 40})
    ended = (transition(generation=1, resume_step=1000), transition(generation=38, resume_step=1200))
    status = known.model_copy(update={"generation": newest, "transitions": ended})
    assert generations_by_step(status) == {1000: [38], 1200: [40]}


@pytest.mark.parametrize(("seconds_after", "shown"), [(300, 300.0), (3600, 60.0), (36_000, 10.0)])
def test_the_time_of_a_job_has_a_unit_that_suits_it(seconds_after: float, shown: float) -> None:
    assert TimeAxis(start=5.0, end=5.0 + seconds_after).at(5.0 + seconds_after) == shown
