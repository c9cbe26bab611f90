"""What a job gets and pays in simulated clouds that take nodes, run out of them, and refuse pods."""

from __future__ import annotations

import pytest

from simulation.capacity import WatchedWorld, random_world
from spottrain_simulator.ranks import Pace
from spottrain_simulator.trace import HOUR, Offer, Trace
from spottrain_simulator.traced import Cloud
from world.jobs import spec_of

pytestmark = pytest.mark.no_cover

MINUTE = 60.0
TIMES = 20
PACE = Pace(start=30.0, step=10.0, nodes=4, save=10.0, commit_every=12, wait=0.0, stall=0.0)


@pytest.mark.parametrize("notice", [120.0, 0.0])
def test_all_spot_nodes_go_at_once_and_come_back_twenty_times(notice: float) -> None:
    """The job goes on from its commit each time, and its cost is that of the record of nodes, to the cent."""
    offers = [Offer(time=15 * MINUTE * turn, nodes=4 * (1 - turn % 2), price=1.0) for turn in range(2 * TIMES + 1)]
    cloud = Cloud(trace=Trace({"spot": offers}, 20 * HOUR), prices={"on-demand": 3.0}, notice_seconds=notice)
    capacity = {
        "onDemand": {"pricePerHour": 3.0},
        "spot": {"pricePerHour": 1.0},
        "fallback": {"policy": "None"},
    }
    spec = spec_of(nodes={"min": 1, "max": 4}, capacity=capacity)
    world = WatchedWorld(spec, total_steps=10**6, pace=PACE, cloud=cloud)
    while world.status.preemptions < TIMES and world.time < 20 * HOUR:
        world.tick(20 * HOUR)
    world.run(25 * MINUTE)
    world.training.finish()
    world.run_until_finished(HOUR)
    world.run(5 * MINUTE)
    assert world.finished, world.story()
    assert world.status.preemptions == TIMES, world.story()
    redone = world.training.num_steps - world.training.total_steps
    assert world.status.steps_redone == redone <= (TIMES * PACE.commit_every if notice == 0 else 0)
    assert world.status.cost is not None
    assert round(world.status.cost.total, 2) == round(world.bill, 2), world.story()
    causes = {each.cause: each.total for each in world.status.cost.causes}
    assert sum(causes.values()) == pytest.approx(world.status.cost.total)
    assert set(causes) == {"Training", "Start", "Idle"} | ({"Redone"} if redone else set())
    assert not world.problems, world.story()


def _assert_all_is_well(seed: int, hours: float) -> None:
    world = random_world(seed, hours=hours)
    world.run_to(hours * HOUR)
    assert not world.problems, f"seed {seed}\n{world.story()}"
    assert world.status.cost is not None
    assert round(world.status.cost.total + world.unrecorded, 2) == round(world.bill, 2), f"seed {seed}"


@pytest.mark.parametrize("seed", range(3))
def test_no_run_waits_beside_a_free_node_nor_pays_for_one_that_it_does_not_use(seed: int) -> None:
    _assert_all_is_well(seed, hours=2.0)


@pytest.mark.nightly
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("first", range(0, 100, 10))
def test_no_run_waits_beside_a_free_node_in_a_hundred_worlds(first: int) -> None:
    for seed in range(first, first + 10):
        _assert_all_is_well(seed, hours=8.0)
