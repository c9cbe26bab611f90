"""The operator's passes over a job whose pools have NodePools of their own, on a cluster in memory."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from operator_world import KEY, CrashingCluster, World, job
from spottrain_operator.controller import Priority
from spottrain_operator.kube.cache import Change
from spottrain_operator.kube.errors import ForbiddenError, NotFoundError
from spottrain_operator.kube.identities import JobKey
from spottrain_operator.kube.resources import DEFINITIONS, JOBS, NODE_POOLS, Manifest, Resource
from spottrain_operator.objects.watched_cluster import WatchedCluster
from spottrain_operator.wakes import wakes
from world.faults import Fault

NODE_CLASS = {"group": "karpenter.k8s.aws", "kind": "EC2NodeClass", "name": "default"}


def pool(kind: str, **changes: Any) -> Manifest:
    return {"name": kind, "capacityType": kind, "provider": "karpenter", "nodeClass": NODE_CLASS} | changes


def asking(*pools: Manifest) -> Manifest:
    return job(capacity={"onDemand": {"min": 1}, "spot": {"max": 2}, "pools": list(pools)})


BOTH = asking(pool("spot", weight=5), pool("on-demand"))


class Pools:
    """A job whose pools have NodePools."""

    def __init__(self, manifest: Manifest = BOTH, **world: Any) -> None:
        self.cluster = CrashingCluster()
        self.cluster.put_job(manifest)
        self.world = World(self.cluster, uses_karpenter=True, **world)

    async def until(self, condition: Any) -> None:
        for _ in range(60):
            if condition():
                return
            await self.world.turn()
        raise AssertionError(f"{self.world.status}, {self.cluster.node_pools}")

    @property
    def kinds(self) -> list[str]:
        """How the nodes of the NodePools are bought."""
        specs = [each["spec"]["template"]["spec"] for each in self.cluster.node_pools.values()]
        return sorted(each["requirements"][-1]["values"][0] for each in specs)

    @property
    def said(self) -> tuple[str, str]:
        condition = self.world.condition("NodePoolsReady")
        return condition["reason"], condition["message"]


async def test_they_come_with_the_job_and_go_with_it() -> None:
    pools = Pools()
    await pools.until(lambda: pools.kinds == ["on-demand", "spot"])
    before = pools.cluster.num_writes
    await pools.world.until_running()
    assert {each["metadata"]["labels"]["spottrain.dev/namespace"] for each in pools.cluster.node_pools.values()} == {
        KEY.namespace
    }
    assert pools.cluster.num_writes > before
    await pools.until(lambda: pools.world.status.get("phase") == "Succeeded")
    await pools.until(lambda: not pools.cluster.node_pools)


async def test_an_edit_changes_the_one_and_removes_the_other() -> None:
    pools = Pools(last_step=10_000)
    await pools.world.until_running()
    kept = next(name for name, each in pools.cluster.node_pools.items() if each["spec"]["weight"] == 5)
    meta = pools.cluster.node_pools[kept]["metadata"]
    meta["annotations"] = {"karpenter.sh/nodepool-hash": "1"}
    pools.cluster.put_job(asking(pool("spot", weight=7), pool("on-demand", nodeClass=NODE_CLASS | {"kind": "Other"})))
    await pools.until(lambda: {each["spec"]["weight"] for each in pools.cluster.node_pools.values()} == {7, 1})
    changed = pools.cluster.node_pools[kept]
    assert changed["metadata"]["annotations"] == {"karpenter.sh/nodepool-hash": "1"}
    assert (changed["spec"]["weight"], changed["metadata"]["uid"]) == (7, meta["uid"])


async def test_those_of_a_deleted_job_go_also_if_the_operator_was_away() -> None:
    pools = Pools()
    await pools.until(lambda: bool(pools.cluster.node_pools))
    somebody_elses = {"metadata": {"name": "theirs", "labels": {"app": "else"}}, "spec": {}}
    pools.cluster.node_pools["theirs"] = somebody_elses
    uid = pools.cluster.jobs[KEY]["metadata"]["uid"]
    await pools.cluster.delete(JOBS, KEY.name, namespace=KEY.namespace, uid=uid)
    pools.world.start_operator()
    await pools.world.turn()
    assert list(pools.cluster.node_pools) == ["theirs"]


async def test_those_of_an_earlier_job_of_the_name_go() -> None:
    pools = Pools(last_step=10_000)
    await pools.until(lambda: len(pools.kinds) == 2)
    for each in pools.cluster.node_pools.values():
        each["metadata"]["labels"]["spottrain.dev/job-uid"] = "earlier"
    earlier = {each["metadata"]["uid"] for each in pools.cluster.node_pools.values()}
    await pools.until(lambda: not earlier & {each["metadata"]["uid"] for each in pools.cluster.node_pools.values()})
    await pools.until(lambda: len(pools.kinds) == 2)


class Lacks(Fault):
    """Karpenter isn't installed, or is another version."""

    def __init__(self) -> None:
        super().__init__(resource=NODE_POOLS, error=NotFoundError("the server could not find the requested resource"))


@pytest.mark.parametrize(
    ("versions", "reason", "expected"),
    [
        (None, "KarpenterMissing", "Karpenter is not installed in this cluster: install version 1.0 or newer, or"),
        (["v1beta1"], "KarpenterTooOld", "serves nodepools.karpenter.sh in v1beta1, and spottrain needs v1"),
    ],
)
async def test_a_cluster_without_karpenter_or_with_an_older_one_is_named_until_it_is_there(
    versions: list[str] | None, reason: str, expected: str
) -> None:
    pools, lacking = Pools(last_step=10_000), Lacks()
    pools.cluster.before.append(lacking)
    if versions:
        served = {"spec": {"versions": [{"name": name, "served": True} for name in versions]}}
        pools.cluster._objects[DEFINITIONS]["nodepools.karpenter.sh"] = served | {"metadata": {}}
    await pools.world.until_running()
    assert pools.said[0] == reason
    assert expected in pools.said[1]
    assert pools.world.num_crashes == 0
    pools.cluster.before.remove(lacking)
    await pools.until(lambda: pools.said == ("NodePoolsMade", "Karpenter can make nodes for the job's pools"))
    assert pools.kinds == ["on-demand", "spot"]


async def test_a_refusal_is_named_and_no_pass_fails() -> None:
    pools = Pools(last_step=10_000)
    refusing = Fault(verbs=("create",), resource=NODE_POOLS, error=ForbiddenError("a webhook says no"))
    pools.cluster.before.append(refusing)
    await pools.world.until_running()
    await pools.until(lambda: bool(pools.world.condition("NodePoolsReady")))
    assert pools.said == ("NodePoolRefused", "a NodePool can't be made: a webhook says no")
    assert pools.world.num_crashes == 0
    pools.cluster.before.remove(refusing)
    await pools.until(lambda: len(pools.kinds) == 2)


async def test_an_operator_that_may_make_none_says_so_and_the_job_runs_on_what_there_is() -> None:
    pools = Pools(last_step=10_000)
    pools.world.uses_karpenter = False
    pools.world.start_operator()
    await pools.world.until_running()
    assert pools.said[0] == "KarpenterOff"
    assert "set the chart's value karpenter.enabled" in pools.said[1]
    assert not pools.cluster.node_pools


async def test_a_job_without_a_node_class_runs_where_there_is_no_karpenter() -> None:
    pools = Pools(job(), last_step=10_000)
    pools.cluster.before.append(Lacks())
    await pools.world.until_running()
    assert not pools.world.condition("NodePoolsReady")


@pytest.mark.parametrize(
    ("crash_at", "after"), [(number, after) for number in (1, 2, 3, 4) for after in (False, True)]
)
async def test_an_operator_that_dies_at_any_write_leaves_none(crash_at: int, after: bool) -> None:
    pools = Pools()
    pools.cluster = CrashingCluster(crash_at=crash_at, after=after)
    pools.cluster._counted = frozenset({NODE_POOLS})
    pools.cluster.put_job(BOTH)
    pools.world = World(pools.cluster, uses_karpenter=True)
    await pools.until(lambda: pools.world.status.get("phase") == "Succeeded")
    await pools.until(lambda: not pools.cluster.node_pools)
    assert pools.world.num_crashes == 1


async def test_a_change_of_a_node_pool_wakes_its_job_and_a_new_operator_finds_what_is_left() -> None:
    cluster = CrashingCluster()
    woken: list[tuple[JobKey, Priority]] = []
    labels = {
        "app.kubernetes.io/managed-by": "spottrain",
        "spottrain.dev/namespace": KEY.namespace,
        "spottrain.dev/job": KEY.name,
    }
    cluster.node_pools["mine"] = {"metadata": {"name": "mine", "labels": labels}, "spec": {}}
    cluster.node_pools["theirs"] = {"metadata": {"name": "theirs", "labels": {"app": "else"}}, "spec": {}}

    def changed(resource: Resource, change: Change) -> None:
        woken.extend(wakes(resource, change, lambda _node: set()))

    watching = WatchedCluster(cluster, changed, optional=[NODE_POOLS])
    following = asyncio.create_task(watching.follow(asyncio.Event()))
    try:
        async with asyncio.timeout(20):
            while not woken:  # noqa: ASYNC110
                await asyncio.sleep(0.001)
        assert set(woken) == {(KEY, Priority.NORMAL)}
        assert watching.jobs_that_left_something() == {KEY}
        found = await watching.list(
            NODE_POOLS, labels={"spottrain.dev/namespace": KEY.namespace, "spottrain.dev/job": KEY.name}
        )
        assert [each["metadata"]["name"] for each in found.items] == ["mine"]
    finally:
        following.cancel()
        await asyncio.wait({following})
