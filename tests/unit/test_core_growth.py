"""When a restart is worth it: for more nodes, for cheaper ones, and with how many at a time."""

from __future__ import annotations

from typing import Any

import pytest

from scene import Scene, at, pod
from simulation.world import World
from spottrain_api.contract.assignments import CapacityType
from spottrain_api.v1alpha1.status import ProgressStatus, Transition
from spottrain_operator.core.facts.restarts import restart_seconds
from spottrain_simulator.ranks import Pace
from timing_scenes import ago, generation_of, grows, idle, restarts_in, smaller
from world.jobs import spec_of

SPOT, ON_DEMAND = CapacityType.SPOT, CapacityType.ON_DEMAND
NO_NODE: dict[str, Any] = {
    "node": None,
    "scheduled_at": None,
    "phase": "Pending",
    "ready": False,
    "ready_since": None,
    "ip": None,
    "container_started": False,
}


def remaining(seconds: float | None, scene: Scene) -> Scene:
    return scene.all_say(progress=None).status(progress=ProgressStatus(eta_seconds=seconds))


@pytest.mark.parametrize(
    ("left", "restart", "expected"),
    [
        (401, 100, True),  # with a fourth node, it takes 301 s
        (399, 100, False),
        (40, 9, True),
        (40, 11, False),
        (10**6, 3600, True),
        (None, 3600, True),
    ],
)
def test_a_job_grows_if_the_rest_gets_shorter_by_more_than_the_restart(
    left: float | None, restart: float, expected: bool
) -> None:
    assert grows(remaining(left, restarts_in(restart, smaller(3)))) is expected


def returning(left: float, restart: float, capacity: dict[str, Any]) -> Scene:
    """Three on-demand members beyond the floor, and a spot pod that is up for one of them."""
    scene = smaller(3).spec(nodes={"min": 2, "max": 3}, capacity=capacity)
    members = tuple(m.model_copy(update={"capacity_type": ON_DEMAND}) for m in generation_of(scene).members)
    scene = idle(scene.generation(members=members).pod(3, capacity_type=ON_DEMAND), 4)
    return remaining(left, restarts_in(restart, scene))


FLOOR = {"onDemand": {"min": 2, "pricePerHour": 3.0}, "spot": {"pricePerHour": 1.0}}


@pytest.mark.parametrize(
    ("capacity", "left", "expected"),
    [
        (FLOOR, 451, True),  # 2 of 9 an hour saved, for 100 s of 9 an hour
        (FLOOR, 449, False),
        (FLOOR | {"spot": {"pricePerHour": 3.0}}, 10**6, False),
        ({"onDemand": {"min": 2}}, 601, True),  # without prices, 0.5 of 3
        ({"onDemand": {"min": 2}}, 599, False),
    ],
    ids=["worth it", "nearly done", "as dear", "without prices", "without prices, nearly done"],
)
def test_a_job_returns_to_spot_nodes_if_the_rest_gets_cheaper_by_more_than_the_restart(
    capacity: dict[str, Any], left: float, expected: bool
) -> None:
    assert grows(returning(left, 100, capacity)) is expected


def restarted(*seconds: float | None, reason: str = "Grow") -> tuple[Transition, ...]:
    return tuple(Transition(generation=1, reason=reason, at=at(0), seconds_without_step=each) for each in seconds)


@pytest.mark.parametrize(
    ("transitions", "expected"),
    [
        ((), 40.0),
        (restarted(None), 40.0),
        (restarted(10, 90, 20), 20.0),
        (restarted(900, 900, 900, 10, 20, 30, 40, 50), 30.0),
        (restarted(600, reason="Suspended"), 40.0),
        (restarted(600, reason="NodeLost"), 40.0),
    ],
    ids=["none", "unfinished", "some", "the newest", "a pause", "a loss"],
)
def test_a_restart_takes_as_long_as_the_last_ones(transitions: tuple[Transition, ...], expected: float) -> None:
    status = restarts_in(40, smaller(3)).observed.job.status.model_copy(update={"transitions": transitions})
    assert restart_seconds(status) == expected


@pytest.mark.parametrize(
    ("waited", "restart", "expected"),
    [
        ((100,), 30, True),  # a wait of one node for 100 s, beside a restart of three for 30 s
        ((80,), 30, False),
        ((120, 60), 40, False),  # each gap is 60 s
        ((120, 60), 20, True),
        ((150, 149), 80, False),
        ((610,), 3600, True),
    ],
)
def test_pods_that_are_up_wait_for_one_more_if_that_costs_less_than_another_restart(
    waited: tuple[float, ...], restart: float, expected: bool
) -> None:
    scene = remaining(10**6, restarts_in(restart, smaller(2).spec(nodes={"min": 2, "max": 6})))
    scene = scene.without_pod(3).without_pod(4).with_pod(pod(9, **NO_NODE))
    for sequence, seconds in enumerate(waited, start=5):
        scene = idle(scene.with_pod(pod(sequence, ready_since=ago(seconds))), sequence)
    assert grows(scene) is expected


def trickle(start: float) -> World:
    """Two nodes train, and five more come, one a minute. A generation takes so long to its first step."""
    pace = Pace(start=start, step=5.0)
    spec = spec_of(nodes={"min": 2, "max": 7}, capacity={"fallback": {"policy": "None"}})
    world = World(spec, seed=5, total_steps=10**5, pace=pace)
    for _ in range(2):
        world.add_node(SPOT)
    world.run(100)
    for _ in range(5):
        world.add_node(SPOT)
        world.run(60)
    world.run(120)
    assert world.status.members.spot == 7, world.story()
    assert not world.problems
    return world


def test_nodes_that_trickle_in_once_a_minute_cost_one_restart() -> None:
    assert [each.reason for each in trickle(60.0).status.transitions] == ["Grow"]


def test_a_job_that_restarts_in_seconds_takes_in_each_node() -> None:
    assert len(trickle(3.0).status.transitions) > 3
