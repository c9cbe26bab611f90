"""Pods that wait for a node of a pool.

An edit of capacity.pools reaches them, and no others. The job says what their pool asks for.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from scene import NOW, Scene, at, pod, training_job, waiting_job
from spottrain_api.contract.assignments import CapacityType
from spottrain_operator.core.facts.pools import pool_hash
from spottrain_operator.core.model import CreatePod, DeletePod, KeptAway, PodView, Refusal
from spottrain_operator.objects.control_address import ControlAddress
from spottrain_operator.objects.observe import pod_view
from spottrain_operator.objects.pods import JobRef, build_pod
from spottrain_operator.objects.trimmed import trimmed_pod
from world.jobs import spec_of

LABELS = {"team": "a"}
FAST: dict[str, Any] = {"name": "fast", "capacityType": "spot", "provider": "custom", "nodeSelector": LABELS}
# Other pools may have its name.
ON_DEMAND = FAST | {"capacityType": "on-demand", "nodeSelector": {"team": "b"}}
TAINT = {"key": "team", "operator": "Exists"}
NO_NODE = {
    "type": "PodScheduled",
    "status": "False",
    "reason": "Unschedulable",
    "lastTransitionTime": at(90).isoformat(),
    "message": "0/6 nodes are available: 6 node(s) didn't match Pod's node affinity/selector.",
}


def pools(*pools: dict[str, Any]) -> dict[str, Any]:
    return {"nodes": {"min": 1, "max": 5}, "capacity": {"pools": list(pools)}}


def waiting_pod(spec: dict[str, Any], pool: str | None) -> PodView:
    """The fifth pod as the operator created it and reads it again. No node suits it."""
    manifest = build_pod(
        JobRef(namespace="default", name="job", uid="0123456789ab"),
        spec_of(**spec),
        name="job-5",
        sequence=5,
        capacity_type=CapacityType.SPOT,
        pool=pool,
        control=ControlAddress(url="https://control:8443", ca="CA"),
    )
    manifest["metadata"] |= {"uid": "u5", "creationTimestamp": at(80).isoformat()}
    read = pod_view(trimmed_pod(manifest | {"status": {"phase": "Pending", "conditions": [NO_NODE]}}))
    return replace(read, template_hash="t1")


def in_pool(scene: Scene, sequence: int, name: str, capacity_type: CapacityType = CapacityType.SPOT) -> Scene:
    """The pod asks for nodes of the pool as it is in the job."""
    return scene.pod(sequence, pool=name, pool_hash=pool_hash(scene.observed.job.spec, capacity_type, name))


def num_created(scene: Scene) -> int:
    return sum(isinstance(action, CreatePod) for action in scene.plan().actions)


def replaced(scene: Scene) -> bool:
    """Whether the fifth pod is deleted and replaced.

    As many are created as if it weren't there.
    """
    deleted = [(each.name, each.reason) for each in scene.plan().actions if isinstance(each, DeletePod)]
    assert deleted in ([], [("job-5", "it waits for nodes of a pool that was edited or removed")])
    assert num_created(scene) == num_created(scene.without_pod(5)) - (not deleted)
    return bool(deleted)


@pytest.mark.parametrize(
    ("now", "edited"),
    [
        ((FAST, ON_DEMAND), False),
        ((ON_DEMAND, FAST), False),
        ((FAST | {"pricePerHour": 9.5}, ON_DEMAND), False),
        ((FAST, ON_DEMAND, FAST | {"name": "more"}), False),
        ((FAST, ON_DEMAND | {"nodeSelector": {"team": "c"}}), False),
        ((FAST | {"nodeSelector": {"team": "c"}}, ON_DEMAND), True),
        ((FAST | {"provider": "gke"}, ON_DEMAND), True),
        ((FAST | {"tolerations": [TAINT]}, ON_DEMAND), True),
        ((FAST | {"name": "other"}, ON_DEMAND), True),
        ((), True),
    ],
    ids=[
        *("the same", "order", "price", "one more", "one of another type"),
        *("labels", "provider", "taints", "name", "removed"),
    ],
)
@pytest.mark.parametrize("begun", [False, True], ids=["a new job", "one that trains"])
def test_a_pod_that_waits_for_an_edited_pool_is_replaced(
    now: tuple[dict[str, Any], ...], edited: bool, begun: bool
) -> None:
    waiting = waiting_pod(pools(FAST, ON_DEMAND), "fast")
    scene = training_job(**pools(*now)) if begun else replace(waiting_job(0, **pools(*now)), now=NOW)
    assert replaced(scene.with_pod(waiting)) == edited


def test_a_pod_that_waits_for_any_node_is_replaced_once_there_are_pools() -> None:
    waiting = waiting_pod(pools(), None)
    assert replaced(waiting_job(0, **pools(FAST)).with_pod(waiting))
    assert not replaced(waiting_job(0, **pools()).with_pod(waiting))


def test_a_pod_with_a_node_stays() -> None:
    placed = replace(waiting_pod(pools(FAST), "fast"), node="n5", unschedulable_since=None)
    assert not replaced(training_job(**pools()).with_pod(placed))


def test_a_job_that_a_newer_version_wrote_keeps_its_pods() -> None:
    scene = waiting_job(0, **pools()).with_pod(waiting_pod(pools(FAST), "fast"))
    assert scene.job(not_understood=("spec.capacity.pools",)).plan().actions == ()


@pytest.mark.parametrize(
    ("pool", "asked"),
    [
        (FAST, "Pool fast asks for team=a"),
        (FAST | {"provider": "eks"}, "Pool fast asks for spot nodes of eks with team=a"),
        ({"name": "fast", "capacityType": "spot", "provider": "gke"}, "Pool fast asks for spot nodes of gke"),
    ],
    ids=["custom", "labels of its own", "provider"],
)
@pytest.mark.parametrize("fallback", [True, False], ids=["on-demand stands in", "alone"])
def test_a_pod_that_waits_for_a_pool_says_what_the_pool_asks_for(
    pool: dict[str, Any], asked: str, fallback: bool
) -> None:
    other = {"name": "floor", "capacityType": "on-demand", "provider": "custom", "nodeSelector": {"team": "b"}}
    spec = pools(pool, other)
    spec["capacity"]["fallback"] = {"policy": "OnDemand" if fallback else "None"}
    scene = replace(waiting_job(0, **spec), now=NOW).with_pod(waiting_pod(spec, "fast"))
    correct = (
        "No spot node has the labels in the pod's nodeSelector and affinity: wait for such a node, add one, or "
        "correct capacity.pools. "
    )
    said = scene.plan().status.condition("PodsHealthy")
    assert said is not None
    assert f"affinity/selector. {asked}. {'' if fallback else correct}The job has 0 of 5 spot nodes" in said.message
    assert f". {asked}. " in scene.plan().status.message


SLOW = FAST | {"name": "slow", "nodeSelector": {"team": "b"}}
NO_CLAIM = 'persistentvolumeclaim "data" not found'
REFUSED = Refusal(
    metadata_generation=1, message="exceeded quota", since=at(300), tried_at=at(300), lasting=False, by_quota=True
)


def dry(*found: dict[str, Any], num_waiting: int = 1, **capacity: Any) -> Scene:
    """Four spot pods are up, and `num_waiting` more wait for pool `fast`."""
    spec = pools(*found)
    spec["nodes"]["max"] = 4 + num_waiting
    spec["capacity"] |= capacity
    scene = replace(waiting_job(0, **spec), now=at(390))
    for sequence in range(1, 5):
        scene = scene.with_pod(pod(sequence, capacity_type=CapacityType.SPOT, pool="slow"))
    for sequence in range(5, 5 + num_waiting):
        waiting = waiting_pod(pools(FAST, SLOW), "fast")
        scene = scene.with_pod(replace(waiting, name=f"job-{sequence}", uid=f"u{sequence}", sequence=sequence))
    return scene.status(last_sequence=4 + num_waiting).all_say()


def refused_beside(scene: Scene, **changes: Any) -> Scene:
    return replace(scene, observed=replace(scene.observed, refusal=replace(REFUSED, **changes)))


def moved(scene: Scene) -> list[str | None]:
    """The pools of the pods that replace as many that are deleted."""
    assert len(created_in(scene)) == sum(isinstance(each, DeletePod) for each in scene.plan().actions)
    return created_in(scene)


def created_in(scene: Scene) -> list[str | None]:
    return [each.pool for each in scene.plan().actions if isinstance(each, CreatePod)]


@pytest.mark.parametrize(
    "capacity",
    [
        {"pools": [FAST], "spot": {"max": 0}, "onDemand": {"max": 4}},
        {"pools": [ON_DEMAND], "onDemand": {"max": 0}, "spot": {"max": 4}},
    ],
    ids=["spot", "on-demand"],
)
def test_a_job_whose_limits_leave_its_pools_no_node_creates_no_pod(capacity: dict[str, Any]) -> None:
    assert waiting_job(0, nodes={"min": 1, "max": 4}, capacity=capacity).plan().actions == ()


def test_pods_that_wait_in_a_pool_without_nodes_move_to_another() -> None:
    scene = dry(FAST, SLOW, num_waiting=3)
    assert moved(scene) == ["slow"] * 3
    [event] = [event for event in scene.plan().events if event.reason == "PodsCreated"]
    assert event.message == "Creating 3 spot pods in place of pods that found no node in fast"


@pytest.mark.parametrize(
    "scene",
    [
        dry(FAST, SLOW).later(-1),
        dry(FAST, SLOW, fallback={"afterSeconds": 301}),
        dry(FAST),
        dry(FAST, ON_DEMAND | {"name": "slow"}, fallback={"policy": "None"}),
        in_pool(dry(FAST, FAST), 5, "fast"),
        dry(FAST, SLOW).pod(5, waiting_message=NO_CLAIM),
        dry(FAST, SLOW).job(not_understood=("spec.capacity.pools",)),
        in_pool(dry(FAST, SLOW, num_waiting=2), 6, "slow"),
        refused_beside(dry(FAST, SLOW), by_quota=False),
        replace(dry(FAST, SLOW), observed=replace(dry(FAST, SLOW).observed, kept_away={"u5": KeptAway(num_down=1)})),
    ],
    ids=[
        *("not for long", "afterSeconds", "one pool", "another of another type", "one pool twice", "no claim"),
        *("not understood", "one waits in each pool", "no pod is accepted", "a node comes up"),
    ],
)
def test_a_pod_stays_in_its_pool(scene: Scene) -> None:
    assert moved(scene) == []


def test_spot_pods_move_while_on_demand_pods_are_refused() -> None:
    scene = refused_beside(dry(FAST, SLOW), capacity_types=frozenset({CapacityType.ON_DEMAND}))
    assert moved(scene) == ["slow"]


def test_a_pod_leaves_its_pool_for_another_one_in_the_same_quota() -> None:
    scene = refused_beside(dry(FAST, SLOW))
    assert {each.name for each in scene.plan().actions if isinstance(each, DeletePod)} == {"job-5"}
    assert created_in(scene.decided().without_pod(5)) == ["slow"]


def test_a_node_that_does_not_come_up_is_not_awaited_for_ever() -> None:
    scene = dry(FAST, SLOW).later(300)
    kept_away = {"u5": KeptAway(num_down=1)}
    assert moved(replace(scene, observed=replace(scene.observed, kept_away=kept_away))) == ["slow"]


def test_a_pool_that_is_added_is_tried_at_once() -> None:
    scene = in_pool(dry(FAST, SLOW, num_waiting=2), 6, "slow")
    added = FAST | {"name": "added", "nodeSelector": {"team": "c"}}
    assert moved(scene.spec(**pools(FAST, SLOW, added) | {"nodes": {"min": 1, "max": 6}})) == ["added"] * 2


def test_on_demand_nodes_stand_in_before_another_pool_is_tried() -> None:
    scene = dry(FAST, SLOW, ON_DEMAND)
    assert "FellBack" in [event.reason for event in scene.plan().events]
    assert [each.capacity_type for each in scene.plan().actions if isinstance(each, CreatePod)] == [
        CapacityType.ON_DEMAND
    ]


@pytest.mark.parametrize("floor", [0, 1])
def test_on_demand_pods_move_too_but_none_that_is_beyond_the_floor(floor: int) -> None:
    """Such a pod stands in for a spot pod that is tried again."""
    more = ON_DEMAND | {"name": "more"}
    scene = dry(SLOW, ON_DEMAND, more, onDemand={"min": floor})
    scene = in_pool(scene.pod(5, capacity_type=CapacityType.ON_DEMAND), 5, "fast", CapacityType.ON_DEMAND)
    assert ("more" in created_in(scene)) == bool(floor)
    deleted = [each.name for each in scene.plan().actions if isinstance(each, DeletePod)]
    assert deleted == ["job-5"] * floor


def test_no_new_pod_is_created_in_a_pool_in_which_one_waits() -> None:
    scene = dry(FAST, SLOW).later(-1).without_pod(4)
    for last_sequence in (5, 6):
        assert created_in(scene.status(last_sequence=last_sequence)) == ["slow"]


NO_GPU = ". They ask for no GPU: resources names none in limits, and replaces the default of one per process"


@pytest.mark.parametrize(
    ("resources", "note"),
    [
        pytest.param(None, "", id="the default"),
        pytest.param({"limits": {"cpu": 2, "memory": "8Gi"}}, NO_GPU, id="processor and memory"),
        pytest.param({}, NO_GPU, id="nothing"),
        pytest.param({"limits": {"amd.com/gpu": 1}}, "", id="another device"),
        pytest.param({"limits": {"nvidia.com/gpu": 0}}, "", id="none, on purpose"),
        pytest.param({"claims": [{"name": "gpus"}]}, "", id="a claim"),
    ],
)
def test_an_event_says_that_pods_ask_for_no_gpu(resources: dict[str, Any] | None, note: str) -> None:
    scene = waiting_job(0, nodes={"max": 1}, **({"resources": resources} if resources is not None else {}))
    events = [event.message for event in scene.plan().events if event.reason == "PodsCreated"]
    assert events == [f"Creating 1 on-demand pod{note}"]
