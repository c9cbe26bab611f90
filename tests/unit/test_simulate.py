"""`spottrain simulate`: traces, the world that follows them, and the table."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml
from click.testing import CliRunner, Result

from spottrain_api.contract.assignments import CapacityType
from spottrain_api.v1alpha1.spec import TrainingJobSpec
from spottrain_api.v1alpha1.status import Phase
from spottrain_cli.main import main
from spottrain_simulator.oracle import least_cost
from spottrain_simulator.strategies import (
    Outcome,
    Work,
    all_on_demand,
    oracle,
    simulate,
    uniform_progress,
    without_fallback,
)
from spottrain_simulator.synthetic import KINDS, synthetic_trace
from spottrain_simulator.trace import HOUR, Offer, Trace, TraceError, read_trace
from spottrain_simulator.traced import Cloud, TracedWorld
from world.jobs import spec_of

POOLS = ["on-demand", "spot"]
PRICES = {"on-demand": 3.0}


def rows(*lines: str, header: str = "time,pool,nodes,price") -> list[str]:
    return [header, *lines]


def read(*lines: str, header: str = "time,pool,nodes,price") -> Trace:
    return read_trace(rows(*lines, header=header), POOLS, unlimited=["on-demand"])


def job(**capacity: object) -> TrainingJobSpec:
    prices = {"onDemand": {"pricePerHour": 3.0}, "spot": {"pricePerHour": 1.0}}
    return spec_of(nodes={"min": 1, "max": 4}, capacity=prices | capacity)


def cloud_of(*offers: tuple[float, int, float], hours: float = 48, **options: float) -> Cloud:
    """A cloud whose spot nodes change at these hours."""
    found = [Offer(time=hour * HOUR, nodes=nodes, price=price) for hour, nodes, price in offers]
    return Cloud(trace=Trace({"spot": found}, hours * HOUR), prices=PRICES, **options)


WORK = Work(steps=8 * 360, step_seconds=10.0)  # eight hours on all nodes


# --- traces ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("lines", "sentence"),
    [
        (["0,spot,2,1", "60,spot,2,-1"], "Line 3: price is -1. Give the price of a node per hour, 0 or more"),
        (["0,spot,2,nan"], "Line 2: price is nan, which is no number"),
        (["0,spot,-2,1"], "Line 2: nodes is -2. Give a whole number of 0 or more"),
        (["0,spot,1.5,1"], "Line 2: nodes is 1.5. Give a whole number of 0 or more"),
        (["0,spot,2,1", "60,gpu,2,1"], "Line 3: the job has no pool gpu. Its pools: on-demand, spot"),
        (["60,spot,2,1", "0,spot,2,1"], "Line 3: its time is before that of the line above. Sort the lines by time"),
        (["0,spot,2,1", "0,spot,3,1", "9,spot,3,1"], "The trace has two rows for the pool spot at one time"),
        (["0,spot,,1"], "Line 2: nodes is empty. Give a value, or remove the line"),
        (["0,spot"], "Line 2: nodes is empty"),
        (["soon,spot,2,1"], "Line 2: time is soon. Give seconds, or a date"),
        (
            ["0,spot,2,1", "3600,spot,2,1", "180000,spot,2,1"],
            "a hole: no row for the pool spot for 49.0 h, from 1.0 h",
        ),
        (["0,on-demand,2,1", "9,on-demand,2,1"], "The trace has no row for the pool spot. Add one, with 0 nodes"),
        (["0,spot,2,1"], "All rows have the same time"),
        ([], "The trace has no rows"),
    ],
)
def test_a_trace_that_makes_no_sense_is_refused_with_a_sentence(lines: list[str], sentence: str) -> None:
    with pytest.raises(TraceError, match=re.escape(sentence)):
        read(*lines)


def test_a_missing_column_is_named() -> None:
    with pytest.raises(TraceError, match="The first line has no column price"):
        read("0,spot,2", header="time,pool,nodes")


def test_times_are_seconds_or_dates_and_count_from_the_first() -> None:
    by_date = read("2026-01-31T12:00:00Z,spot,2,1", "2026-01-31T13:00:00+00:00,spot,3,1.5")
    assert by_date == read("100,spot,2,1", "3700,spot,3,1.5")
    assert [by_date.at("spot", time).nodes for time in (0, 3599, 3600, 9999)] == [2, 2, 3, 3]
    assert by_date.cost("spot", 1800, 5400) == 0.5 * 1 + 0.5 * 1.5


@pytest.mark.parametrize("kind", KINDS)
def test_a_synthetic_trace_is_that_of_its_seed(kind: str) -> None:
    trace = synthetic_trace(kind, 1, nodes=4)
    assert trace == synthetic_trace(kind, 1, nodes=4) != synthetic_trace(kind, 2, nodes=4)
    offers = trace.offers["spot"]
    assert all(0 <= each.nodes <= 4 and each.price >= 0 for each in offers)
    assert [each.time for each in offers] == sorted({each.time for each in offers})
    assert len({(each.nodes, each.price) for each in offers}) > 1


# --- the oracle ------------------------------------------------------------------------------------------


def test_the_oracle_buys_the_cheapest_hours_that_are_enough() -> None:
    """Two hours of four spot nodes for 1, then dear ones, then on-demand nodes for 3 are cheaper."""
    cloud = cloud_of((0, 4, 1.0), (2, 4, 5.0), (4, 1, 2.0))
    spec = job()
    assert least_cost(spec, cloud, 8, 0, 10 * HOUR) == 8.0
    assert least_cost(spec, cloud, 10, 0, 10 * HOUR) == 8 + 2 * 2.0
    assert least_cost(spec, cloud, 40, 0, 10 * HOUR) == 8 + 6 * 2.0 + 26 * 3.0
    assert least_cost(spec, cloud, 41, 0, 10 * HOUR) is None


def test_the_oracle_keeps_to_the_jobs_limits() -> None:
    cloud = cloud_of((0, 2, 1.0))
    assert least_cost(job(onDemand={"min": 1, "pricePerHour": 3.0}), cloud, 4, 0, HOUR) == 3 + 2 * 1 + 3
    assert least_cost(job(onDemand={"max": 0}), cloud, 4, 0, HOUR) is None
    together = job().model_copy(update={"nodes": spec_of(nodes={"min": 4, "max": 4}).nodes})
    assert least_cost(together, cloud, 2, 0, HOUR) == pytest.approx(0.5 * (2 * 1 + 2 * 3))


# --- lives -----------------------------------------------------------------------------------------------


def lives(spec: TrainingJobSpec, cloud: Cloud) -> Iterator[Outcome]:
    yield simulate("job", spec, cloud, WORK)
    yield simulate("all on-demand", all_on_demand(spec), cloud, WORK)
    yield simulate("spot, no fallback", without_fallback(spec), cloud, WORK)
    yield uniform_progress(spec, cloud, WORK, 14 * HOUR)


def test_lives_in_a_trace_with_a_shortage_of_three_hours() -> None:
    cloud = cloud_of((0, 4, 1.0), (2, 0, 1.0), (5, 4, 1.0))
    job_, on_demand, spot, uniform = lives(job(), cloud)
    assert [each.finish is not None for each in (job_, on_demand, spot, uniform)] == [True] * 4
    finishes = [round((each.finish or 0) / HOUR) for each in (job_, on_demand, spot, uniform)]
    assert finishes[:3] == [8, 8, 11]
    assert 8 <= finishes[3] <= 14
    best = oracle(job(), cloud, WORK, 14 * HOUR)
    assert best is not None
    assert best.cost == pytest.approx(32.0)
    assert best.cost < spot.cost < job_.cost < on_demand.cost
    assert spot.on_demand_hours == 0 < job_.on_demand_hours
    assert on_demand.cost == pytest.approx(3 * on_demand.on_demand_hours)
    assert spot.interruptions > 0
    assert (spot.steps_redone, spot.goodput and spot.goodput < 0.8) == (0, True)


def test_a_loss_without_notice_costs_the_steps_since_the_commit() -> None:
    cloud = cloud_of((0, 4, 1.0), (2.1, 2, 1.0), notice_seconds=0.0)
    lived = simulate("job", job(fallback={"policy": "None"}), cloud, WORK)
    assert 1 <= lived.steps_redone <= WORK.commit_seconds / WORK.step_seconds
    assert lived.interruptions == 1


def test_uniform_progress_waits_while_it_is_ahead_and_fills_up_when_it_is_behind() -> None:
    none = cloud_of((0, 4, 1.0), (4, 0, 1.0))
    early, late = (uniform_progress(job(), none, WORK, hours * HOUR) for hours in (10, 30))
    for lived, hours in ((early, 10), (late, 30)):
        assert lived.finish is not None
        assert lived.finish <= hours * HOUR
        assert 13 < lived.spot_hours < 16.5
    assert late.finish is not None
    assert late.finish > 25 * HOUR


def test_the_operator_meets_the_same_moments_with_and_without_jumps() -> None:
    """Jumps skip only moments in which nothing happens."""
    cloud = cloud_of((0, 4, 1.0), (0.1, 2, 1.0), (0.2, 4, 1.0), hours=0.4)

    def life(longest: float) -> tuple[list[str], float]:
        world = TracedWorld(job(), total_steps=10**4, pace=WORK.pace(job()), cloud=cloud)
        while world.time < cloud.trace.end and not world.finished:
            world.tick(min(cloud.trace.end, world.time + longest))
        return [event.split(" ", 1)[1] for event in world.events], world.time

    jumping, walking = life(HOUR), life(1.0)
    seconds = re.compile(r"[0-9:.]+")
    assert [seconds.sub("", each) for each in jumping[0]] == [seconds.sub("", each) for each in walking[0]]
    assert jumping[1] == pytest.approx(walking[1], abs=30)


@pytest.mark.parametrize("kind", KINDS)
def test_no_run_waits_while_nodes_that_it_may_use_are_free(kind: str) -> None:
    """Once the offers stay, the job has all nodes that it may use, and pays for no others."""
    drawn = synthetic_trace(kind, 5, nodes=4)
    offers = [each for each in drawn.offers["spot"] if each.time < 2 * HOUR]
    offers.append(Offer(time=2 * HOUR, nodes=3, price=1.0))
    world = TracedWorld(
        job(),
        total_steps=10**6,
        pace=WORK.pace(job()),
        cloud=Cloud(trace=Trace({"spot": offers}, 48 * HOUR), prices=PRICES),
    )
    world.run_to(3.5 * HOUR)
    assert world.status.phase is Phase.RUNNING
    assert (world.status.members.spot, world.status.members.on_demand) == (3, 1), "\n".join(world.events[-20:])
    held = [node.capacity_type for node in world.nodes.values() if node.alive]
    assert sorted(held) == [CapacityType.ON_DEMAND] + [CapacityType.SPOT] * 3


# --- the command -----------------------------------------------------------------------------------------


def command(folder: Path, trace: list[str], *options: str, **capacity: object) -> Result:
    document = {"kind": "TrainingJob", "metadata": {"name": "gpt"}, "spec": job(**capacity).to_dict()}
    (folder / "job.yaml").write_text(yaml.safe_dump(document))
    (folder / "trace.csv").write_text("\n".join(trace))
    given = ["--trace", str(folder / "trace.csv"), "--steps", "720", "--step-time", "10s"]
    return CliRunner(env={"COLUMNS": "120"}).invoke(main, ["simulate", str(folder / "job.yaml"), *given, *options])


def test_the_table_has_a_row_for_each_rule_and_the_picture_is_svg(tmp_path: Path) -> None:
    trace = rows("0,spot,4,1", "3600,spot,0,1", "5400,spot,4,1", "36000,spot,4,1")
    result = command(tmp_path, trace, "--picture", str(tmp_path / "nodes.svg"))
    assert result.exit_code == 0, result.output
    names = ("gpt", "all on-demand", "spot, no fallback", "Uniform Progress", "oracle")
    assert [name for name in names if re.search(rf"^{name} +[0-9.]+ h", result.output, re.MULTILINE)] == list(names)
    assert "<svg" in (tmp_path / "nodes.svg").read_text()


def test_a_job_that_does_not_end_in_the_trace_says_so(tmp_path: Path) -> None:
    result = command(tmp_path, rows("0,spot,0,1", "3600,spot,0,1"), fallback={"policy": "None"})
    assert re.search(r"^gpt +not in 1 h", result.output, re.MULTILINE), result.output


def test_a_job_with_time_waits_for_spot_nodes(tmp_path: Path) -> None:
    trace = rows("0,spot,4,1", "1800,spot,0,1", "16200,spot,4,1", "36000,spot,4,1")
    result = command(tmp_path, trace, "--finish-within", "9h")
    assert re.search(r"^gpt +[56]\.[0-9] h +[0-9.]+ +0 ", result.output, re.MULTILINE), result.output


@pytest.mark.parametrize(
    ("trace", "options", "capacity", "sentence"),
    [
        (
            rows("0,spot,2,1", "9,spot,2,1"),
            [],
            {"finishBy": "2026-01-02T00:00:00Z"},
            "Give the time until then: --fin",
        ),
        (rows("0,spot,2,-1"), [], {}, "trace.csv: Line 2: price is -1."),
        (rows("0,spot,2,1", "9,spot,2,1"), ["--finish-within", "soon"], {}, "soon is no time. Write a number with s"),
        (
            rows("0,spot,2,1", "9,spot,2,1"),
            [],
            {"onDemand": {}},
            "On-demand nodes have no price. Set capacity.onDema",
        ),
        (rows("0,spot,2,1", "9,spot,2,1"), ["--picture", "/no/folder.svg"], {}, "/no/folder.svg cannot be written"),
    ],
)
def test_what_cannot_be_simulated_is_said_in_a_sentence(
    tmp_path: Path, trace: list[str], options: list[str], capacity: dict[str, object], sentence: str
) -> None:
    result = command(tmp_path, trace, *options, **capacity)
    assert result.exit_code != 0
    assert sentence in " ".join(result.output.split()), result.output
    assert "Traceback" not in result.output
