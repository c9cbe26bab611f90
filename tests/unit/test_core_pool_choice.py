"""Which pool comes first: by weight, price, what the cloud took lately, and which had no node."""

from __future__ import annotations

from typing import Any

import pytest
from pydantic import ValidationError

from scene import Scene, at, notice, pod, training_job, waiting_job
from simulation.world import World
from spottrain_api.contract.assignments import CapacityType
from spottrain_api.v1alpha1.capacity import Capacity, OnDemandCapacity
from spottrain_api.v1alpha1.spending import CostStatus
from spottrain_api.v1alpha1.status import Transition
from spottrain_operator.core.facts.costs import price
from spottrain_operator.core.facts.demand import demand
from spottrain_operator.core.facts.pools import pool_hash
from spottrain_operator.core.model import CreatePod
from spottrain_operator.objects.placement import node_affinity
from world.jobs import spec_of

SPOT, ON_DEMAND = CapacityType.SPOT, CapacityType.ON_DEMAND


def pool_of(name: str, hourly: float | None = None, **changes: Any) -> dict[str, Any]:
    fields: dict[str, Any] = {"name": name, "capacityType": "spot", "provider": "gke"}
    return fields | ({} if hourly is None else {"pricePerHour": hourly}) | changes


CHEAP, MIDDLE, DEAR = pool_of("cheap", 1.0), pool_of("middle", 2.0), pool_of("dear", 3.0)


def created(scene: Scene) -> list[str | None]:
    return [action.pool for action in scene.plan().actions if isinstance(action, CreatePod)]


@pytest.mark.parametrize(
    ("pools", "expected"),
    [
        ((DEAR, CHEAP, MIDDLE), ["cheap"] * 3),
        ((DEAR, pool_of("unpriced")), ["unpriced", "dear", "unpriced"]),
        ((CHEAP, DEAR | {"weight": 2}), ["dear"] * 3),
        ((CHEAP | {"weight": 0}, DEAR), ["dear"] * 3),
        ((pool_of("a"), pool_of("b"), pool_of("c")), ["b", "c", "a"]),
        ((pool_of("a", 1.0), pool_of("b", 1.0), DEAR), ["b", "a", "b"]),
    ],
    ids=["price", "the price of the type", "weight", "weight 0", "turns", "turns of the cheapest"],
)
def test_the_best_pool_gets_the_pods(pools: tuple[dict[str, Any], ...], expected: list[str]) -> None:
    assert created(waiting_job(0, nodes={"max": 3}, capacity={"pools": list(pools)})) == expected


def test_a_pool_of_which_the_cloud_took_a_node_comes_last() -> None:
    capacity = {"onDemand": {"min": 2}, "pools": [CHEAP, DEAR, pool_of("od", capacityType="on-demand")]}
    scene = training_job(capacity=capacity)
    for sequence in (3, 4):
        scene = scene.pod(sequence, pool="cheap", pool_hash=pool_hash(scene.observed.job.spec, SPOT, "cheap"))
    taken = scene.node(4, notice=notice(4))
    assert created(taken) == ["dear"]
    [avoided] = taken.plan().status.avoided_pools
    assert (avoided.name, avoided.capacity_type, avoided.message) == ("cheap", "spot", "The cloud takes a node of it")
    assert created(scene.without_pod(4)) == ["cheap"], "a pod that somebody deletes says nothing about its pool"


def test_every_pool_is_tried_though_the_cheapest_comes_first() -> None:
    """Only the dearest has nodes."""
    capacity = {"pools": [CHEAP, MIDDLE, DEAR]}
    world = World(spec_of(nodes={"min": 2, "max": 2}, capacity=capacity), seed=3, total_steps=10**6)
    for _ in range(2):
        world.add_node(SPOT, "dear")
    tried = []
    for _ in range(3):
        world.run(60)
        tried.append({each.pool for each in world.pods.values()})
        world.run(250)
    assert tried == [{"cheap"}, {"middle"}, {"dear"}], world.story()
    assert world.status.members.spot == 2
    assert not world.problems


def test_reserved_nodes_come_first_and_are_paid_already() -> None:
    reserved = pool_of("block", capacityType="reserved", provider="eks")
    on_demand = pool_of("od", 3.0, capacityType="on-demand")
    spec = spec_of(nodes={"min": 2, "max": 2}, capacity={"onDemand": {"min": 2}, "pools": [on_demand, reserved]})
    assert [price(spec.capacity, ON_DEMAND, each) for each in ("block", "od", None)] == [0.0, 3.0, 3.0]
    required = node_affinity(spec, ON_DEMAND, "block")["requiredDuringSchedulingIgnoredDuringExecution"]
    of_nodes, of_template = (each["matchExpressions"] for each in required["nodeSelectorTerms"])
    assert of_nodes == [{"key": "eks.amazonaws.com/capacityType", "operator": "In", "values": ["CAPACITY_BLOCK"]}]
    assert of_template == [{"key": "capacityType", "operator": "In", "values": ["CAPACITY_BLOCK"]}]
    world = World(spec, seed=4, total_steps=10**6)
    world.add_node(ON_DEMAND, "block")
    world.add_node(ON_DEMAND, "od")
    world.run(400)
    assert sorted(str(each.pool) for each in world.pods.values()) == ["block", "od"], world.story()
    assert world.status.members.on_demand == 2
    cost = world.status.cost
    assert cost is not None
    assert {each.pool: each.total > 0 for each in cost.pools} == {"block": False, "od": True}


@pytest.mark.parametrize(
    ("floor", "num_nodes", "expected"),
    [(2, 8, 2), ("2", 8, 2), (9, 8, 8), ("25%", 8, 2), ("25%", 9, 3), ("0%", 8, 0), ("100%", 8, 8), ("1%", 1, 1)],
)
def test_the_floor_may_be_a_share(floor: int | str, num_nodes: int, expected: int) -> None:
    capacity = {"onDemand": {"min": floor}}
    assert demand(spec_of(nodes={"max": num_nodes}, capacity=capacity)).on_demand == expected


def test_a_share_is_bounded_by_the_most_on_demand_nodes() -> None:
    assert OnDemandCapacity.model_validate({"min": "50%", "max": 3}).floor(16) == 3


@pytest.mark.parametrize("floor", [-1, "-1", True, 1.5, "half", "101%", "2.5%", "%", "", None])
def test_a_floor_that_is_neither_a_number_nor_a_share_is_refused(floor: object) -> None:
    with pytest.raises(ValidationError):
        Capacity.model_validate({"onDemand": {"min": floor}})


def interrupted(*seconds: float, **capacity: Any) -> Scene:
    """A job of four nodes whose interruptions cost so many seconds each, the first 50 minutes ago."""
    prices = {"onDemand": {"min": 2, "pricePerHour": 3.0}, "spot": {"pricePerHour": 1.0}}
    scene = training_job(capacity=prices | capacity).later(2 * 3600)
    lost = tuple(
        Transition(
            generation=number, reason="Preempted", at=at(7300 - 3000 + 600 * number), seconds_without_step=each
        )
        for number, each in enumerate(seconds)
    )
    return scene.status(transitions=lost, cost=CostStatus())


@pytest.mark.parametrize(
    ("scene", "falls_back"),
    [
        (interrupted(500, 500, 500), True),  # 42 % of the hour, and spot nodes save a third
        (interrupted(300, 300, 300), False),  # 25 %
        (interrupted(1000, 1000), False),
        (interrupted(500, 500, 500, spot={"pricePerHour": 0.1}), False),  # they save 48 %
        (interrupted(500, 500, 500, fallback={"policy": "None"}), False),
        (interrupted(500, 500, 500, onDemand={"min": 2, "max": 2, "pricePerHour": 3.0}), False),
    ],
    ids=["often", "seldom", "only two", "cheap spot", "no fallback", "no on-demand nodes left"],
)
def test_on_demand_nodes_stand_in_if_interruptions_cost_more_than_spot_saves(scene: Scene, falls_back: bool) -> None:
    plan = scene.plan()
    assert (plan.status.fallback_since is not None) is falls_back
    said = [event.message for event in plan.events if event.reason == "FellBack"]
    sentence = (
        "Interruptions have taken 42% of the job's last hour, more than spot nodes save: on-demand nodes take the "
        "place of those that go"
    )
    assert said == ([sentence] if falls_back else [])


def test_after_interruptions_spot_nodes_are_tried_again_once_they_are_worth_it() -> None:
    """The first of three ends to count 10 minutes from now, earlier than returnAfterSeconds."""
    scene = interrupted(500, 500, 500, fallback={"returnAfterSeconds": 60}).decided()
    again = scene.plan().status.condition("SpotAvailable")
    assert again is not None
    assert again.message == (
        "On-demand nodes stand in for spot nodes, which are tried again at 02:11:40 UTC "
        "(capacity.fallback.returnAfterSeconds, and interruptions cost more than spot nodes save until then)"
    )
    assert scene.later(590).plan().status.fallback_since is not None
    assert scene.later(601).plan().status.fallback_since is None


def test_a_node_that_goes_is_replaced_by_an_on_demand_one_meanwhile() -> None:
    scene = interrupted(500, 500, 500).decided().without_pod(4)
    actions = [action for action in scene.plan().actions if isinstance(action, CreatePod)]
    assert [action.capacity_type for action in actions] == [ON_DEMAND]
    assert pod(4).capacity_type is SPOT
