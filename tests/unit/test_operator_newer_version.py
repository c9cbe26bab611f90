"""An operator that is older than the job.

What runs goes on, and what hasn't begun waits.
"""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import pytest

from operator_world import KEY, CrashingCluster, World, job
from spottrain_api.contract.assignments import AssignmentAction
from spottrain_operator.kube.resources import JOBS

UNKNOWN: dict[str, Any] = {"colour": "red"}
# Required, so that no default can stand for it.
UNREADABLE: dict[str, Any] = {"nodes": {"min": 2, "max": "many"}}


def condition(world: World) -> dict[str, Any]:
    conditions = world.status.get("conditions", ())
    return next((each for each in conditions if each["type"] == "SpecNotUnderstood"), {"status": None})


async def training(cluster: CrashingCluster) -> World:
    """A job whose first generation trains."""
    cluster.put_job(job())
    world = World(cluster)
    while world.status.get("phase") != "Running":
        await world.turn()
    return world


@pytest.mark.parametrize("changes", [UNKNOWN, {"strategy": "wishful"}, {"podTemplate": {"hostIPC": True}}], ids=str)
async def test_a_job_that_runs_goes_on_without_what_is_not_understood(changes: dict[str, Any]) -> None:
    world = await training(CrashingCluster())
    [field] = (f"spec.{key}" for key in changes)
    world.cluster.put_job(job(**changes, image="local/train"))
    world.start_operator()  # a rollback
    await world.turn()
    assert condition(world)["status"] == "True"
    assert field in condition(world)["message"]
    assert "upgrade the operator" in condition(world)["message"]
    assert "The job continues without" in condition(world)["message"]
    await world.until_finished()
    assert world.status["phase"] == "Succeeded"
    assert world.status["generation"]["number"] == 1
    assert len(world.cluster.created) == 3
    assert [event["reason"] for event in world.cluster.events].count("SpecNotUnderstood") == 1


async def test_its_membership_is_looked_after() -> None:
    world = await training(CrashingCluster())
    world.cluster.put_job(job(**UNKNOWN))
    [(_, lost), *_] = world.cluster.pods
    del world.cluster.pods[KEY.namespace, lost]
    for _ in range(3):
        await world.turn()
    assert len(world.cluster.pods) == 3
    assert [each["reason"] for each in world.status["transitions"]] == ["NodeLost"]
    assert lost not in {name for _, name in world.cluster.pods}


@pytest.mark.parametrize(
    "capacity",
    [{"onDemand": {"min": "25%"}, "spot": {"max": 2}}, {"onDemand": {"min": "25%"}}, "wishful"],
    ids=str,
)
async def test_a_limit_that_is_not_understood_takes_nothing_from_a_job_that_runs(capacity: Any) -> None:
    """The default for its on-demand nodes is none."""
    world = await training(CrashingCluster())
    world.training.total_steps = 100
    world.cluster.put_job(job(capacity=capacity))
    for _ in range(40):
        await world.turn()
    assert (world.status["phase"], world.status["generation"]["state"]) == ("Running", "Active")
    assert (len(world.cluster.created), world.cluster.deleted) == (3, set())


@pytest.mark.parametrize("policy", [{"hangTimeoutSeconds": "2h"}, {"hangTimeoutSeconds": 0}, "patient"], ids=str)
async def test_steps_are_waited_for_while_their_limit_is_not_understood(policy: Any) -> None:
    """The default is 600 s, and a newer version may know of a slow evaluation."""
    world = await training(CrashingCluster())
    world.cluster.put_job(job(runPolicy=policy))
    world.training.total_steps = 100
    world.training.hang(1, world.now - timedelta(hours=1))
    for _ in range(5):
        await world.turn()
    assert (world.status["phase"], world.status["generation"]["state"]) == ("Running", "Active")
    waits = "The generation continues, as this operator doesn't understand runPolicy.hangTimeoutSeconds"
    assert waits in world.status["message"]
    world.cluster.put_job(job())
    await world.turn()
    assert world.status["generation"]["reason"] == "Hang", "understood again, it is heeded"


@pytest.mark.parametrize("keeps", [{"keep": 5000}, {"keep": 4, "keepEvery": "1h"}], ids=str)
async def test_no_commit_is_deleted_while_the_number_to_keep_is_not_understood(keeps: dict[str, Any]) -> None:
    """The default is 2, and what a generation's clean-up deletes is gone for good."""
    world = await training(CrashingCluster())
    world.cluster.put_job(job(checkpoint={"uri": "s3://bucket/prefix"} | keeps))
    await world.turn()
    pod, *_ = world.cluster.pods.values()
    told = await world.board.next(pod["metadata"]["uid"], after=None, timeout_seconds=5)
    assert told is not None
    assert told.generation is not None
    checkpoint = told.generation.trainer["checkpoint"]
    assert (checkpoint["keep"], checkpoint["keepEvery"]) == (1000, 1)


@pytest.mark.parametrize("begun", [False, True], ids=["not begun", "trains"])
async def test_pods_that_wait_keep_their_place_while_a_limit_is_not_understood(begun: bool) -> None:
    capacity = {"onDemand": {"min": 0}, "spot": {"max": 2}}
    world = World(CrashingCluster())
    world.training.total_steps = 100
    world.cluster.put_job(job(capacity=capacity))
    while begun and world.status.get("phase") != "Running":
        await world.turn()
    world.cluster.put_job(job())
    await world.reconciler.reconcile(KEY)  # it creates the on-demand pod
    pods = set(world.cluster.pods)
    assert len(pods) == 3
    world.cluster.put_job(job(capacity=capacity | {"onDemand": {"min": "25%"}}))
    for _ in range(5):
        await world.turn()
    assert (set(world.cluster.pods), world.cluster.deleted) == (pods, set())


async def test_pods_of_a_template_that_is_not_understood_are_kept() -> None:
    """A newer operator made them, so that their hash is none that this one comes to."""
    world = await training(CrashingCluster())
    for pod in world.cluster.pods.values():
        pod["metadata"]["labels"]["spottrain.dev/template-hash"] = "newer"
    stored = world.cluster.jobs[KEY]
    stored["status"]["generation"]["templateHash"] = "newer.newer"
    world.cluster.put_job(job(podTemplate={"hostIPC": True}))
    await world.turn()
    assert world.cluster.deleted == set()
    assert world.status["generation"]["state"] == "Active"
    world.cluster.put_job(job())
    for _ in range(2):
        await world.turn()
    assert world.status["generation"]["state"] == "Draining", "understood again, it follows the job"


@pytest.mark.parametrize("changes", [UNKNOWN, UNREADABLE], ids=["left out", "unreadable"])
async def test_a_job_that_has_not_begun_waits_until_it_is_understood(changes: dict[str, Any]) -> None:
    cluster = CrashingCluster()
    cluster.put_job(job(**changes))
    world = World(cluster)
    for _ in range(5):
        await world.turn()
    assert (world.status["phase"], cluster.created) == ("Pending", [])
    assert condition(world)["status"] == "True"
    assert world.status["message"] == condition(world)["message"]
    before = cluster.num_writes
    await world.turn()
    assert cluster.num_writes == before
    cluster.put_job(job())
    await world.turn()
    assert condition(world)["status"] == "False"
    await world.until_finished()
    assert world.status["phase"] == "Succeeded"


async def test_pods_of_a_job_that_has_not_begun_are_left() -> None:
    cluster = CrashingCluster()
    cluster.put_job(job())
    world = World(cluster)
    await world.reconciler.reconcile(KEY)
    cluster.put_job(job(**UNKNOWN))
    for _ in range(5):
        await world.turn()
    assert (len(cluster.pods), cluster.deleted) == (3, set())
    assert "generation" not in world.status


@pytest.mark.parametrize(
    ("spec", "status"),
    [(UNREADABLE, {}), ({}, {"phase": "Paused"}), ({}, {"commit": {"generation": "x"}})],
    ids=["spec", "phase", "commit"],
)
async def test_what_cannot_be_read_at_all_is_left_as_it_is(spec: dict[str, Any], status: dict[str, Any]) -> None:
    world = await training(CrashingCluster())
    stored = world.cluster.put_job(job(**spec))
    before = world.status | status
    await world.cluster.replace(JOBS, stored | {"status": before}, subresource="status")
    for _ in range(3):
        await world.reconciler.reconcile(KEY)
    after = world.status
    assert condition(world)["status"] == "True"
    assert "The operator leaves the job alone, and its pods continue, until then" in condition(world)["message"]
    others = [each for each in after["conditions"] if each["type"] != "SpecNotUnderstood"]
    assert after | {"conditions": others} == before
    assert world.cluster.deleted == set()
    stored = world.cluster.put_job(job())
    kept = {k: v for k, v in after.items() if k not in status}
    await world.cluster.replace(JOBS, stored | {"status": kept}, subresource="status")
    await world.turn()
    assert condition(world)["status"] == "False"
    assert world.status["generation"]["number"] == 1


@pytest.mark.parametrize(("finalizer", "num_left"), [("example.com/audit", 0), ("orphan", 3)])
async def test_what_cannot_be_read_at_all_holds_no_nodes_once_it_is_being_deleted(
    finalizer: str, num_left: int
) -> None:
    world = await training(CrashingCluster())
    pods = [pod["metadata"]["uid"] for pod in world.cluster.pods.values()]
    world.cluster.put_job(job(**UNREADABLE))
    deleted = {"deletionTimestamp": "2026-01-01T00:00:00Z", "finalizers": [finalizer]}
    world.cluster.jobs[KEY]["metadata"] |= deleted
    await world.reconciler.reconcile(KEY)
    told = [await world.board.next(uid, after=None, timeout_seconds=5) for uid in pods]
    assert all(each is not None and each.action is AssignmentAction.EXIT for each in told)
    await world.turn()
    assert (len(world.cluster.pods), len(world.cluster.deleted)) == (num_left, 3 - num_left)
    assert b'job_name="gpt"' not in world.metrics.exposition()[0]


async def test_a_required_field_that_cannot_be_read_is_named() -> None:
    world = await training(CrashingCluster())
    world.cluster.put_job(job(**UNREADABLE))
    await world.turn()
    assert "doesn't understand spec.nodes.max, which" in condition(world)["message"]


async def test_nothing_changes_in_a_job_that_is_over() -> None:
    world = await training(CrashingCluster())
    await world.until_finished()
    await world.turn()  # charges the nodes that are gone
    before = world.status
    for changes in (UNKNOWN, UNREADABLE):
        world.cluster.put_job(job(**changes))
        await world.turn()
        assert world.status | {"observedGeneration": 0} == before | {"observedGeneration": 0}


async def test_a_status_keeps_what_a_newer_operator_wrote_into_it() -> None:
    world = await training(CrashingCluster())
    world.cluster.jobs[KEY]["status"] |= {"quota": {"used": 3}}
    await world.until_finished()
    assert world.status["quota"] == {"used": 3}
