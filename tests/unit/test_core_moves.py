"""A job on dear nodes moves to a cheaper pool once that has nodes again, if it pays."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from simulation.world import World
from spottrain_api.contract.assignments import CapacityType
from spottrain_operator.core.timing import DEFAULT_TIMING
from world.jobs import spec_of

SPOT, ON_DEMAND = CapacityType.SPOT, CapacityType.ON_DEMAND


def pool(name: str, hourly: float, capacity_type: str = "spot") -> dict[str, Any]:
    return {"name": name, "capacityType": capacity_type, "provider": "gke", "pricePerHour": hourly}


def on_dear_nodes(*, total_steps: int = 10**6, cheap: float = 1.0) -> World:
    """Three nodes of the dear pool train; the cheap one has had none."""
    world = world_of([pool("cheap", cheap), pool("dear", 3.0)], num_nodes=3, total_steps=total_steps)
    for _ in range(3):
        world.add_node(SPOT, "dear")
    world.run(60)
    assert held(world) == ["dear"] * 3, world.story()
    return world


def world_of(pools: list[dict[str, Any]], *, num_nodes: int, total_steps: int = 10**6, floor: int = 0) -> World:
    """A pod waits half a minute for a node, and a pool without one is asked again two minutes later."""
    capacity = {"onDemand": {"min": floor}, "pools": pools, "fallback": {"afterSeconds": 30}}
    spec = spec_of(nodes={"min": num_nodes, "max": num_nodes}, capacity=capacity)
    timing = replace(DEFAULT_TIMING, pool_patience=30.0, pool_avoidance=120.0)
    return World(spec, seed=5, total_steps=total_steps, timing=timing)


def held(world: World) -> list[str]:
    """The pools of the nodes that the job holds."""
    return sorted(str(each.pool) for each in world.pods.values() if each.node is not None)


def changes(world: World) -> list[str]:
    return [transition.reason for transition in world.status.transitions]


def test_a_job_moves_with_one_restart_once_the_cheaper_pool_has_nodes() -> None:
    world = on_dear_nodes()
    before = changes(world)
    for _ in range(3):
        world.add_node(SPOT, "cheap")
    world.run(240)
    assert held(world) == ["cheap"] * 3, world.story()
    assert changes(world) == [*before, "Grow"], world.story()
    assert world.status.steps_redone == 0
    assert not world.problems


def test_it_moves_as_far_as_there_are_nodes() -> None:
    world = on_dear_nodes()
    world.add_node(SPOT, "cheap")
    world.run(480)
    assert held(world) == ["cheap", "dear", "dear"], world.story()
    assert changes(world).count("Grow") == 1, "a pool without nodes costs no restart"
    assert not world.problems


def test_a_pod_asks_alone_and_seldom_for_nodes_that_do_not_come() -> None:
    world = on_dear_nodes()
    before, step, asked = changes(world), world.status.progress.step, 0
    for _ in range(60):
        world.run(10)
        waiting = [each for each in world.pods.values() if each.pool == "cheap"]
        assert len(waiting) <= 1, world.story()
        asked += len(waiting)
    assert 9 <= asked <= 18, "half a minute of two and a half"
    assert changes(world) == before
    assert world.status.progress.step > step
    assert not world.problems


@pytest.mark.parametrize(
    "prices", [{"cheap": 3.0}, {"cheap": 2.999, "total_steps": 600}], ids=["equal", "at the end"]
)
def test_a_job_stays_if_a_move_does_not_pay(prices: dict[str, Any]) -> None:
    world = on_dear_nodes(**prices)
    for _ in range(3):
        world.add_node(SPOT, "cheap")
    world.run(240)
    assert "Grow" not in changes(world), world.story()
    assert "cheap" not in held(world)


def test_a_job_moves_from_on_demand_nodes_to_those_that_are_reserved() -> None:
    reserved = {"name": "block", "capacityType": "reserved", "provider": "eks"}
    world = world_of([reserved, pool("od", 3.0, "on-demand")], num_nodes=2, floor=2)
    for _ in range(2):
        world.add_node(ON_DEMAND, "od")
    world.run(60)
    assert held(world) == ["od", "od"]
    for _ in range(2):
        world.add_node(ON_DEMAND, "block")
    world.run(240)
    assert held(world) == ["block", "block"], world.story()
    assert not world.problems
