"""Reads from caches.

They see own writes at once, are sure of what may have happened, and outlive broken watches.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

import pytest

from operator_world import KEY, job
from spottrain_api.contract.assignments import CapacityType
from spottrain_api.contract.names import LABEL_JOB, LABEL_JOB_UID
from spottrain_api.v1alpha1.spec import TrainingJobSpec
from spottrain_operator.kube.cache import Change
from spottrain_operator.kube.cluster import Cluster
from spottrain_operator.kube.errors import AlreadyExistsError, ClusterError, ConflictError
from spottrain_operator.kube.resources import JOBS, NODES, PODS, Manifest, Resource
from spottrain_operator.objects.control_address import ControlAddress
from spottrain_operator.objects.pods import JobRef, annotate_pod, build_pod
from spottrain_operator.objects.watched_cluster import WatchedCluster
from world.cluster import MemoryCluster
from world.faults import Fault

CONTROL = ControlAddress(url="https://control:8443", ca="CA")
LOST = ClusterError("the connection was closed")


async def replace_status(cluster: Cluster, job: Manifest) -> Manifest:
    return await cluster.replace(JOBS, job, subresource="status")


class World:
    """A cluster, the caches before it, and what they have told.

    Attributes:
        answer: What happens to the answers to writes that took effect.
    """

    def __init__(self) -> None:
        self.direct = MemoryCluster()
        self.answer = Fault(verbs=("create", "replace"))
        self.direct.after.append(self.answer)
        self.changes: list[tuple[Resource, Change]] = []
        self.cluster = WatchedCluster(self.direct, lambda *change: self.changes.append(change))
        self.uid = self.direct.put_job(job())["metadata"]["uid"]

    def pod(self, sequence: int, **spec: Any) -> Manifest:
        made = build_pod(
            JobRef(namespace=KEY.namespace, name=KEY.name, uid=self.uid),
            TrainingJobSpec.model_validate(job()["spec"]),
            name=f"gpt-{sequence}",
            sequence=sequence,
            capacity_type=CapacityType.SPOT,
            pool=None,
            control=CONTROL,
        )
        made["spec"] |= spec
        return made

    def hide(self, resource: Resource) -> None:
        """From now on, its watch shows nothing."""
        self.direct.before.append(Fault(verbs=("watch",), resource=resource, answers=asyncio.Event()))

    async def names(self) -> list[str]:
        return [pod["metadata"]["name"] for pod in await self.pods()]

    async def pods(self) -> list[Manifest]:
        labels = {LABEL_JOB: KEY.name, LABEL_JOB_UID: self.uid}
        return list((await self.cluster.list(PODS, namespace=KEY.namespace, labels=labels)).items)

    def seen(self) -> str:
        """The image of the job as the watch has shown it, once it has a status."""
        shown = self.cluster._jobs.get((KEY.namespace, KEY.name)) or {}
        return str(shown["spec"]["image"]) if shown.get("status") else ""

    async def job(self) -> Manifest:
        found = await self.cluster.get(JOBS, KEY.name, namespace=KEY.namespace)
        assert found is not None
        return found

    @asynccontextmanager
    async def watched(self) -> AsyncIterator[None]:
        """With watches that run. After it, the caches stay as they are."""
        synced = asyncio.Event()
        following = asyncio.create_task(self.cluster.follow(synced))
        try:
            async with asyncio.timeout(5):
                await synced.wait()
            yield
        finally:
            following.cancel()
            await asyncio.wait({following})


@pytest.fixture
async def world() -> World:
    """Whose caches know the job, and whose watches are behind from now on."""
    world = World()
    async with world.watched():
        pass
    return world


async def until(condition: Callable[[], object]) -> None:
    async with asyncio.timeout(5):
        while not condition():  # noqa: ASYNC110 - any condition
            await asyncio.sleep(0.001)


async def test_reads_ask_the_api_server_nothing(world: World) -> None:
    await replace_status(world.cluster, await world.job() | {"status": {"lastSequence": 1}})
    await world.cluster.create(PODS, world.pod(1))
    world.direct.num_reads.clear()
    assert (await world.job())["metadata"]["uid"] == world.uid
    assert await world.names() == ["gpt-1"]
    assert len(list((await world.cluster.list(JOBS)).items)) == 1
    assert world.direct.num_reads.total() == 0


async def test_own_writes_are_seen_though_the_watches_are_behind(world: World) -> None:
    written = await replace_status(world.cluster, await world.job() | {"status": {"phase": "Running"}})
    assert await world.job() == written
    await world.cluster.create(PODS, world.pod(1))
    placed = await world.cluster.create(PODS, world.pod(2, nodeName="node-a"))
    uid, protected = placed["metadata"]["uid"], {"karpenter.sh/do-not-disrupt": "true"}
    await annotate_pod(world.cluster, KEY.namespace, "gpt-2", uid=uid, annotations=protected)
    assert await world.names() == ["gpt-1", "gpt-2"]
    for name in ("gpt-1", "gpt-2"):
        uid = world.direct.pods[KEY.namespace, name]["metadata"]["uid"]
        await world.cluster.delete(PODS, name, namespace=KEY.namespace, uid=uid)
    [pod] = await world.pods()
    assert pod["metadata"]["name"] == "gpt-2", "the other had no node, and is gone at once"
    assert "deletionTimestamp" in pod["metadata"]
    assert pod["metadata"]["annotations"] == {**protected, **CONTROL.annotations}


async def test_the_echo_of_an_own_status_wakes_nobody(world: World) -> None:
    async with world.watched():
        world.changes.clear()
        await replace_status(world.cluster, await world.job() | {"status": {"phase": "Running"}})
        world.direct.put_node({"metadata": {"name": "node-a"}, "spec": {}, "status": {}})
        await until(lambda: world.changes)
        assert {kind for kind, _ in world.changes} == {NODES}
        edited = job(image="other")
        world.direct.put_job(edited)
        await until(lambda: len(world.changes) == 2)


@pytest.mark.parametrize("lost", [False, True])
@pytest.mark.parametrize("edited", [False, True])
async def test_an_echo_before_the_answer_wakes_nobody_if_it_shows_what_was_written(
    world: World, lost: bool, edited: bool
) -> None:
    async with world.watched():
        found = await world.job()
        await world.names()
        num_reads = world.direct.num_reads[PODS]
        world.changes.clear()
        world.answer.answers = asyncio.Event()
        world.answer.error = LOST if lost else None
        status = {"phase": "Running", "lastSequence": 1}
        writing = asyncio.create_task(replace_status(world.cluster, found | {"status": status}))
        await until(lambda: world.direct.jobs[KEY].get("status"))
        if edited:
            world.direct.put_job(world.direct.jobs[KEY] | {"spec": job(image="other")["spec"]})
        await until(lambda: world.seen() == world.direct.jobs[KEY]["spec"]["image"])
        assert not world.changes, "it may be the own status"
        world.answer.release()
        await asyncio.wait({writing})
        told = [(change.before, change.after) for _, change in world.changes]
        if not lost and not edited:
            assert told == []
            await world.names()
            assert world.direct.num_reads[PODS] == num_reads, "the operator has counted the pods itself"
            return
        ((before, after),) = told
        assert before is not None
        assert "status" not in before, "the change is the whole one since the write began"
        assert after is not None
        assert after["status"] == status
        assert (after["spec"]["image"] == "other") is edited


async def test_a_deletion_during_a_write_that_fails_is_reported(world: World) -> None:
    async with world.watched():
        found = await world.job()
        world.changes.clear()
        world.answer.answers = asyncio.Event()
        world.answer.error = LOST
        writing = asyncio.create_task(replace_status(world.cluster, found | {"status": {"phase": "Running"}}))
        await until(lambda: world.direct.jobs[KEY].get("status"))
        await world.direct.delete(JOBS, KEY.name, namespace=KEY.namespace, uid=world.uid)
        await until(lambda: world.cluster._jobs.get((KEY.namespace, KEY.name)) is None)
        world.answer.release()
        await asyncio.wait({writing})
        assert [(kind, change.after) for kind, change in world.changes] == [(JOBS, None)]


async def test_a_pod_whose_creation_was_not_answered_is_looked_for(world: World) -> None:
    world.answer.error = LOST
    with pytest.raises(ClusterError):
        await world.cluster.create(PODS, world.pod(1))
    world.answer.error = None
    assert await world.names() == ["gpt-1"], "otherwise the next pass would create another"
    world.direct.num_reads.clear()
    assert await world.names() == ["gpt-1"]
    assert world.direct.num_reads.total() == 0, "once is enough"


async def test_a_name_that_is_taken_is_looked_for(world: World) -> None:
    await world.direct.create(PODS, world.pod(1))
    assert await world.names() == []
    with pytest.raises(AlreadyExistsError):
        await world.cluster.create(PODS, world.pod(1))
    assert await world.names() == ["gpt-1"]


async def test_a_pod_that_a_fresh_look_misses_does_not_come_back(world: World) -> None:
    await world.cluster.create(PODS, world.pod(1))
    uid = world.direct.pods[KEY.namespace, "gpt-1"]["metadata"]["uid"]
    await world.direct.delete(PODS, "gpt-1", namespace=KEY.namespace, uid=uid)
    assert await world.names() == ["gpt-1"], "the watch has not shown it yet"
    await world.cluster.delete(PODS, "gpt-1", namespace=KEY.namespace, uid=uid)
    assert await world.names() == []
    assert await world.names() == []


async def test_a_status_that_may_have_been_written_is_read(world: World) -> None:
    world.answer.error = LOST
    with pytest.raises(ClusterError):
        await replace_status(world.cluster, await world.job() | {"status": {"phase": "Running"}})
    assert (await world.job())["status"] == {"phase": "Running"}


async def test_after_a_conflict_the_job_is_read(world: World) -> None:
    old = await world.job()
    world.direct.put_job(job(image="other"))
    assert (await world.job())["spec"]["image"] == old["spec"]["image"], "the watch has not shown it yet"
    with pytest.raises(ConflictError):
        await replace_status(world.cluster, old | {"status": {"phase": "Running"}})
    assert (await world.job())["spec"]["image"] == "other"


async def test_with_a_job_its_pods_are_read(world: World) -> None:
    """Its status may count pods that the watch has not shown.

    The next pass would create others in their place.
    """
    old = await world.job()
    await replace_status(world.direct, old | {"status": {"lastSequence": 1}})
    await world.direct.create(PODS, world.pod(1))
    with pytest.raises(ConflictError):
        await replace_status(world.cluster, old | {"status": {"lastSequence": 1}})
    assert (await world.job())["status"] == {"lastSequence": 1}
    assert await world.names() == ["gpt-1"]


async def test_a_job_is_read_whose_status_does_not_count_a_pod(world: World) -> None:
    """To an old spec, the pods of a new one would be of an older template.

    They would be deleted.
    """
    world.hide(JOBS)
    async with world.watched():
        world.changes.clear()
        edited = world.direct.put_job(job(image="other"))
        await replace_status(world.direct, edited | {"status": {"lastSequence": 1}})
        await world.direct.create(PODS, world.pod(1))
        await until(lambda: world.changes)
    assert (await world.job())["spec"]["image"] == "other"


async def test_pods_are_read_that_the_status_of_another_operator_counts(world: World) -> None:
    """Otherwise members of a generation that it has started would seem to be gone."""
    world.hide(PODS)
    async with world.watched():
        world.changes.clear()
        await replace_status(world.direct, await world.job() | {"status": {"lastSequence": 1}})
        await world.direct.create(PODS, world.pod(1))
        await until(lambda: world.changes)
    assert await world.names() == ["gpt-1"]


async def test_a_job_that_no_cache_holds_is_read() -> None:
    """Otherwise pods that are seen before their job would be deleted.

    They would count as those of a job that is gone.
    """
    world = World()
    assert (await world.job())["metadata"]["uid"] == world.uid


async def test_a_job_that_is_gone_stays_gone(world: World) -> None:
    old = await world.job()
    await world.direct.delete(JOBS, KEY.name, namespace=KEY.namespace, uid=world.uid)
    with pytest.raises(ConflictError):
        await replace_status(world.cluster, old | {"status": {"phase": "Running"}})
    for _ in range(2):
        assert await world.cluster.get(JOBS, KEY.name, namespace=KEY.namespace) is None


async def test_the_pods_of_a_job_that_is_gone_are_read_once(world: World) -> None:
    """Otherwise those that Kubernetes has orphaned just before would be deleted."""
    await world.cluster.create(PODS, world.pod(1))
    world.hide(PODS)
    async with world.watched():
        world.changes.clear()
        pod = world.direct.pods[KEY.namespace, "gpt-1"]
        del pod["metadata"]["ownerReferences"]
        await world.direct.delete(JOBS, KEY.name, namespace=KEY.namespace, uid=world.uid)
        await until(lambda: world.changes)
    world.direct.num_reads.clear()
    for _ in range(2):
        [read] = await world.pods()
        assert not read["metadata"]["ownerReferences"]
    assert world.direct.num_reads.total() == 1


async def test_a_node_that_no_cache_holds_is_read(world: World) -> None:
    """A pod may be seen on its node before the node itself is."""
    world.direct.put_node({"metadata": {"name": "node-a"}, "spec": {}, "status": {}})
    node = await world.cluster.get(NODES, "node-a")
    assert node is not None
    assert node["metadata"]["name"] == "node-a"
    assert await world.cluster.get(NODES, "nobody") is None


async def test_a_list_after_a_watch_that_expired_shows_what_was_missed(world: World) -> None:
    async with world.watched():
        made = await world.cluster.create(PODS, world.pod(1))
        world.changes.clear()
        del world.direct.pods[KEY.namespace, "gpt-1"]
        world.direct.forget_history()
        await until(lambda: world.changes)
        [(kind, change)] = world.changes
        assert kind is PODS
        assert change.after is None
        assert change.before is not None
        assert change.before["metadata"]["uid"] == made["metadata"]["uid"]


async def test_watches_go_on_where_they_ended(world: World) -> None:
    async with world.watched():
        await world.cluster.create(PODS, world.pod(1))
        world.direct.num_reads.clear()
        world.direct.before.append(Fault(error=ClusterError("connection refused"), verbs=("watch",)))
        await asyncio.sleep(0.02)
        world.direct.put_node({"metadata": {"name": "node-a"}, "spec": {}, "status": {}})
        world.direct.before.pop()
        await until(lambda: any(kind is NODES for kind, _ in world.changes))
        assert world.direct.num_reads.total() == 0, "nothing is listed again"


async def test_jobs_are_found_by_the_nodes_and_the_pods_that_they_have(world: World) -> None:
    await world.cluster.create(PODS, world.pod(1, nodeName="node-a"))
    assert world.cluster.jobs_on("node-a") == {KEY}
    assert world.cluster.jobs_on("node-b") == set()
    assert world.cluster.jobs_that_left_something() == {KEY}


async def test_tainted_nodes_are_found_as_they_are_now(world: World) -> None:
    """Not as the scheduler saw them."""
    tainted = {"metadata": {"name": "node-a"}, "spec": {"taints": [{"key": "team", "effect": "NoSchedule"}]}}
    async with world.watched():
        world.changes.clear()
        world.direct.put_node(tainted)
        world.direct.put_node({"metadata": {"name": "node-b"}, "spec": {}})
        await until(lambda: len(world.changes) == 2)
        assert [node["metadata"]["name"] for node in world.cluster.tainted_nodes()] == ["node-a"]
        world.direct.put_node(tainted | {"spec": {}})
        await until(lambda: not world.cluster.tainted_nodes())
