"""`spottrain plan` with a number of steps or tokens: days, money, and the smallest change."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from plan_command import in_one_line
from plan_command import run as planned
from spottrain_api.v1alpha1.spec import TrainingJobSpec
from spottrain_cli.forecast import Run, forecasts, smallest_change
from world.jobs import spec_of

CAPACITY = {"onDemand": {"min": 2, "pricePerHour": 3.0}, "spot": {"pricePerHour": 1.0}}
DAY = 24 * 3600.0


def job(**changes: Any) -> TrainingJobSpec:
    return spec_of(**({"nodes": {"min": 1, "max": 4}, "capacity": CAPACITY} | changes))


def run_of(**changes: Any) -> Run:
    """Ten days of work on four nodes."""
    fields = {"steps": 86400, "step_seconds": 10.0, "nodes": 4, "interruptions": 0.0}
    return Run(**(fields | {"restart_seconds": 0.0, "node_seconds": 0.0} | changes))


def test_days_hours_and_money_without_interruptions() -> None:
    on_demand, mixed = forecasts(job(processesPerNode=2), run_of())
    assert on_demand.seconds == mixed.seconds == 10 * DAY
    assert on_demand.gpu_hours == mixed.gpu_hours == 240 * 4 * 2
    assert (on_demand.cost, mixed.cost) == (240 * 4 * 3.0, 240 * (2 * 3.0 + 2 * 1.0))
    assert mixed.commits == 10 * DAY / 900


def test_an_interruption_costs_two_restarts_and_the_node_in_between() -> None:
    """Two spot nodes, each taken 12 times a day: once an hour, 60 s and a quarter of 1200 s are lost."""
    run = run_of(interruptions=12.0, restart_seconds=30.0, node_seconds=1200.0)
    on_demand, mixed = forecasts(job(), run)
    assert mixed.seconds == pytest.approx((10 * DAY + 30) / (1 - 360 / 3600))
    assert mixed.interruptions == pytest.approx(mixed.seconds / 3600)
    assert (on_demand.seconds, on_demand.interruptions) == (10 * DAY + 30, 0)


@pytest.mark.parametrize(
    ("limits", "expected"),
    [
        ({"limit": 11 * DAY}, ""),
        ({"limit": 9 * DAY}, "nodes.max 5."),
        ({"limit": 5 * DAY}, "nodes.max 8."),
        ({"budget": 1500.0}, "capacity.onDemand.min 1."),
        ({"budget": 960.0}, "capacity.onDemand.min 0."),
        ({"limit": 5 * DAY, "budget": 1000.0}, "nodes.max 8 and capacity.onDemand.min 0."),
        ({"budget": 480.0}, "As it is, it can make 21,600 steps."),
        ({"limit": DAY / 10}, "As it is, it can make 864 steps."),
    ],
)
def test_the_smallest_change_that_meets_the_limits(limits: dict[str, float], expected: str) -> None:
    said = smallest_change(job(), run_of(**limits))
    assert said.endswith(expected), said
    assert bool(said) == bool(expected)


def test_the_command_counts_tokens(tmp_path: Path) -> None:
    options = ["--tokens", "300B", "--sequence-length", "2048", "--step-time", "12s", "--finish-within", "20d"]
    result = planned(tmp_path, *options, columns=120, capacity=CAPACITY)
    assert result.exit_code == 0, result.output
    assert "2,288,819 steps of 12 s on 8 nodes" in in_one_line(result.output)
    assert "on-demand alone 317.9" in in_one_line(result.output)
    assert "The job takes longer than 480.0 h." in in_one_line(result.output)
    assert "No other number of nodes" in in_one_line(result.output)


@pytest.mark.parametrize(
    ("options", "capacity", "sentence"),
    [
        (["--steps", "9"], CAPACITY, "The time of a step is missing. Give --step-time"),
        (["--tokens", "1B", "--step-time", "1s"], CAPACITY, "Give --sequence-length"),
        (["--steps", "9", "--tokens", "1B"], CAPACITY, "Give either --steps or --tokens"),
        (["--tokens", "many", "--sequence-length", "9"], CAPACITY, "many"),
        (["--steps", "9", "--step-time", "1s"], {}, "have no price. Set capacity.onDemand.pricePerHour"),
        (["--steps", "9", "--step-time", "1s", "--interruptions", "9999"], CAPACITY, "restarts take all the time"),
        ([], CAPACITY, "Give --accelerator-memory, such as 80GiB, or --steps"),
    ],
)
def test_what_is_missing_is_said_in_a_sentence(
    tmp_path: Path, options: list[str], capacity: dict[str, Any], sentence: str
) -> None:
    result = planned(tmp_path, *options, capacity=capacity)
    assert result.exit_code != 0
    assert sentence in in_one_line(result.output), result.output
    assert "Traceback" not in result.output
