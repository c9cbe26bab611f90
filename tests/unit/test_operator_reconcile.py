"""Passes over a job, with the operator crashing around every single write.

The passes go from the job's beginning to its end. After Sieve (OSDI '22), the oracle is the undisturbed run. However
the operator crashes, the job ends the same way, and no pod is created or deleted more often.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any

import pytest

from operator_world import KEY, LAST_STEP, CrashingCluster, World, job
from spottrain_api.contract.assignments import AssignmentAction
from spottrain_api.contract.names import ANNOTATION_WATCHER, LABEL_JOB, TAINT_PREEMPTION
from spottrain_operator.kube.errors import ClusterError
from spottrain_operator.kube.resources import EVENTS, HISTORIES, JOBS, PODS, Resource
from spottrain_operator.objects.watched_cluster import OnChange, WatchedCluster
from world.faults import Fault, Request

# The spec of a node whose watcher has marked it.
NOTICED = {"taints": [{"key": TAINT_PREEMPTION, "effect": "NoSchedule"}]}


def end_state(world: World) -> dict[str, Any]:
    status = world.status
    return {
        "phase": status["phase"],
        "step": status["progress"]["step"],
        "generation": status["generation"]["number"],
        "commit": status["commit"]["step"],
        "failures": status["failures"],
        "preemptions": status["preemptions"],
        "created": len(world.cluster.created),
        "deleted": len(world.cluster.deleted),
        "pods": len(world.cluster.pods),
    }


async def lived(cluster: CrashingCluster) -> World:
    cluster.put_job(job())
    world = World(cluster)
    await world.until_finished()
    return world


async def test_a_job_lives_from_pods_to_success() -> None:
    world = await lived(CrashingCluster())
    assert end_state(world) == {
        "phase": "Succeeded",
        "step": LAST_STEP,
        "generation": 1,
        "commit": LAST_STEP,
        "failures": 0,
        "preemptions": 0,
        "created": 3,
        "deleted": 3,
        "pods": 0,
    }


@pytest.mark.parametrize("after", [False, True], ids=["before the write", "after the write"])
async def test_a_crash_around_any_write_changes_nothing_in_the_end(after: bool) -> None:
    undisturbed = await lived(CrashingCluster())
    assert undisturbed.cluster.num_writes > 12
    for crash_at in range(1, undisturbed.cluster.num_writes + 1):
        world = await lived(CrashingCluster(crash_at=crash_at, after=after))
        assert world.num_crashes == 1
        assert end_state(world) == end_state(undisturbed), f"crash at write {crash_at}"


def failing_actions(crash_at: int | None = None) -> CrashingCluster:
    """Fails instead of crashing, and neither at the job's status nor at its events."""
    return CrashingCluster(crash_at=crash_at, crash=ClusterError, spares=frozenset({JOBS, EVENTS}))


async def drained(cluster: CrashingCluster) -> World:
    """A job that trained, until a node got a notice and its pod ended.

    The operator repeats a pass that failed.
    """
    cluster.put_job(job())
    world = World(cluster, last_step=10_000, isolates_jobs=True, restarts=False)
    await world.until_running()
    await world.turn()
    [pod, *_] = (pod for (_, name), pod in cluster.pods.items() if pod["spec"]["nodeName"] == f"spot-{name}")
    node = cluster.nodes[pod["spec"]["nodeName"]] | {"spec": NOTICED}
    for _ in range(3):
        cluster.nodes[pod["spec"]["nodeName"]] = node
        await world.turn()
    return world


async def test_a_failed_action_costs_no_event_and_no_metric_of_the_decision() -> None:
    """The status has it by then, so no later pass makes it again."""

    def records(world: World) -> tuple[set[str], list[bytes]]:
        metrics, _ = world.metrics.exposition()
        return {event["reason"] for event in world.cluster.events}, [
            line for line in metrics.splitlines() if b"notice_to_drain_seconds_count" in line
        ]

    undisturbed = await drained(failing_actions())
    assert "Preempted" in records(undisturbed)[0]
    assert undisturbed.cluster.num_writes > 8
    for crash_at in range(1, undisturbed.cluster.num_writes + 1):
        world = await drained(failing_actions(crash_at))
        assert world.num_crashes == 1
        assert records(world) == records(undisturbed), f"failure of action {crash_at}"


async def test_the_second_pass_at_the_same_moment_writes_nothing() -> None:
    cluster = CrashingCluster()
    cluster.put_job(job())
    world = World(cluster)
    for _ in range(25):
        await world.reconciler.reconcile(KEY)
        before = cluster.num_writes
        await world.reconciler.reconcile(KEY)
        assert cluster.num_writes == before
        await world.turn()


async def test_agents_get_only_what_is_written() -> None:
    """The status write that starts the generation fails: nobody may run yet."""
    cluster = CrashingCluster()
    cluster.put_job(job())
    world = World(cluster)

    async def refuse_generations(request: Request) -> None:
        if request[:2] == ("replace", JOBS) and request.body and request.body["status"].get("generation"):
            raise ClusterError("the API server is down")

    cluster.before.append(refuse_generations)
    for _ in range(30):
        await world.turn()
    assert world.num_crashes > 0
    assert not world.training.of


async def test_only_the_status_is_written_before_agents_hear_of_a_notice() -> None:
    """Annotations, pods, events and the history come after the assignments."""
    cluster = CrashingCluster()
    cluster.put_job(job())
    world = World(cluster, last_step=10_000)
    await world.until_running()
    await world.turn()
    [pod, *_] = (pod for (_, name), pod in cluster.pods.items() if pod["spec"]["nodeName"] == f"spot-{name}")
    cluster.nodes[pod["spec"]["nodeName"]]["spec"] = NOTICED
    writes, statuses, records = cluster.num_writes, cluster.num_status_writes, len(cluster.histories)
    heard: list[tuple[bool, int, int, int]] = []

    async def published(*, trains: bool) -> None:
        told = await world.board.next(pod["metadata"]["uid"], after=None, timeout_seconds=0)
        assert told is not None
        assert told.action is AssignmentAction.DRAIN
        written = (cluster.num_writes - writes, cluster.num_status_writes - statuses)
        heard.append((trains, *written, len(cluster.histories) - records))

    await world.reconciler.reconcile(KEY, published)
    assert heard == [(False, 1, 1, 0)]
    assert cluster.num_writes - writes > 2, "the pod's protection ends, and an event says why"


async def test_a_notice_is_heeded_though_the_events_of_a_pod_that_starts_can_not_be_read() -> None:
    cluster = CrashingCluster()
    busy = Fault(error=ClusterError("too many requests", retry_after=1.0), verbs=("list",), resource=EVENTS)
    cluster.before.append(busy)
    cluster.put_job(job())
    world = World(cluster, last_step=10_000)
    await world.until_running()
    _, spot, last = cluster.pods.values()
    creating = {"name": "trainer", "state": {"waiting": {"reason": "ContainerCreating"}}}
    last["status"] |= {"phase": "Pending", "conditions": [], "containerStatuses": [creating]}
    cluster.nodes[spot["spec"]["nodeName"]]["spec"] = NOTICED
    await world.reconciler.reconcile(KEY)
    assert cluster.num_reads[EVENTS] == 1
    assert (world.status["phase"], world.status["generation"]["reason"]) == ("Draining", "Preempted")


async def test_pods_that_only_bear_the_labels_are_not_the_jobs() -> None:
    cluster = CrashingCluster()
    cluster.put_job(job())
    world = World(cluster)
    await world.turn()
    [some, *_] = cluster.pods.values()
    stranger = {**some, "metadata": {**some["metadata"], "name": "gpt-99", "uid": "x", "ownerReferences": []}}
    cluster.pods[KEY.namespace, "gpt-99"] = stranger
    for _ in range(5):
        await world.reconciler.reconcile(KEY)
    assert "gpt-99" not in cluster.deleted


@pytest.mark.parametrize(("labels", "seconds"), [({}, None), ({"cloud.google.com/gke-spot": "true"}, 15)], ids=str)
async def test_agents_get_what_the_shutdown_of_their_node_leaves(
    labels: dict[str, str], seconds: float | None
) -> None:
    cluster = CrashingCluster()
    cluster.put_job(job())
    world = World(cluster)
    await world.turn()
    for node in cluster.nodes.values():
        node["metadata"]["labels"] = labels
    await world.reconciler.reconcile(KEY)
    for pod in cluster.pods.values():
        told = await world.board.next(pod["metadata"]["uid"], after=None, timeout_seconds=0)
        assert told is not None
        assert told.shutdown_grace_seconds == seconds


@asynccontextmanager
async def watched(
    cluster: CrashingCluster, on_change: OnChange = lambda _resource, _change: None
) -> AsyncIterator[tuple[World, Callable[[], Awaitable[None]]]]:
    """A world whose operator reads from caches.

    It comes with a function that takes a turn, after which the caches show everything.
    """
    client = WatchedCluster(cluster, on_change)
    synced = asyncio.Event()
    following = asyncio.create_task(client.follow(synced))
    await synced.wait()
    world = World(cluster, client=client, last_step=10_000)

    async def shown() -> bool:
        pods = (await client.list(PODS, namespace=KEY.namespace, labels={LABEL_JOB: KEY.name})).items
        real = {name: pod["status"].get("phase") for (_, name), pod in cluster.pods.items()}
        return {pod["metadata"]["name"]: pod["status"].get("phase") for pod in pods} == real

    async def turn() -> None:
        await world.turn()
        async with asyncio.timeout(5):
            while not await shown():  # noqa: ASYNC110 - there is no event for it
                await asyncio.sleep(0.001)

    try:
        yield world, turn
    finally:
        following.cancel()
        await asyncio.wait({following})


async def test_a_pass_at_rest_asks_and_writes_nothing() -> None:
    cluster = CrashingCluster()
    cluster.put_job(job())
    async with watched(cluster) as (world, turn):
        while world.status.get("phase") != "Running":
            await turn()
        for _ in range(3):  # the pods of members are annotated, and their nodes are seen
            await turn()
        cluster.num_reads.clear()
        steps, writes = world.status["progress"]["step"], cluster.num_writes
        for _ in range(30):
            await turn()
        del cluster.num_reads[HISTORIES]  # it is kept now and then
        assert (dict(cluster.num_reads), cluster.num_writes - writes) == ({}, 0)
        for _ in range(30):
            await turn()
        assert cluster.num_writes - writes == 1, "the progress, after three quarters of a minute"
        assert world.status["progress"]["step"] > steps + 30


def older_crd(lacks: str) -> CrashingCluster:
    """A cluster whose CRD lacks a field of the status.

    The API server drops it from what is written.
    """
    cluster = CrashingCluster()

    async def drop(request: Request) -> None:
        if request[:2] == ("replace", JOBS) and request.body:
            request.body["status"].pop(lacks, None)

    cluster.before.append(drop)
    return cluster


@pytest.mark.parametrize("lacks", ["message", "accountedAt", "members", "stepsRedone"])
async def test_a_status_that_an_older_crd_prunes_makes_no_loop_of_writes(lacks: str) -> None:
    assert (await lived(older_crd(lacks))).status["phase"] == "Succeeded"
    cluster = older_crd(lacks)
    cluster.put_job(job())
    told: list[Resource] = []
    async with watched(cluster, lambda resource, _: told.append(resource)) as (world, turn):
        while world.status.get("phase") != "Running":
            await turn()
        told.clear()
        writes = cluster.num_status_writes
        for _ in range(30):
            await turn()
        assert cluster.num_status_writes - writes <= 30, "one a pass at most"
        assert JOBS not in told, "what was written wakes no further pass"
        assert (len(cluster.created), len(cluster.deleted), world.status["phase"]) == (3, 0, "Running")


async def test_agents_get_the_mark_of_their_nodes_watcher() -> None:
    cluster = CrashingCluster()
    cluster.put_job(job())
    world = World(cluster)
    await world.turn()
    for mark in ("", "mark"):
        for node in cluster.nodes.values():
            node["metadata"]["annotations"] = {ANNOTATION_WATCHER: mark} if mark else {}
        await world.reconciler.reconcile(KEY)
        for pod in cluster.pods.values():
            told = await world.board.next(pod["metadata"]["uid"], after=None, timeout_seconds=0)
            assert told is not None
            assert told.watcher == mark


async def test_a_job_whose_image_cannot_be_pulled_quotes_the_event() -> None:
    cluster = CrashingCluster()
    cluster.put_job(job())
    world = World(cluster)
    await world.reconciler.reconcile(KEY)
    backing_off = {"reason": "ImagePullBackOff", "message": 'Back-off pulling image "a:1"'}
    for pod in cluster.pods.values():
        pod["status"] = {
            "phase": "Pending",
            "containerStatuses": [{"name": "trainer", "state": {"waiting": backing_off}}],
        }
        for message in ('Failed to pull image "a:1": unauthorized', "Error: ErrImagePull"):
            about = {"uid": pod["metadata"]["uid"]}
            cluster.put_event(KEY.namespace, {"involvedObject": about, "reason": "Failed", "message": message})
    await world.reconciler.reconcile(KEY)
    assert 'ImagePullBackOff: Failed to pull image "a:1": unauthorized' in world.status["message"]


async def test_a_pod_without_a_node_names_the_nodes_that_are_cordoned() -> None:
    cluster = CrashingCluster()
    cluster.put_job(job())
    world = World(cluster)
    await world.reconciler.reconcile(KEY)
    scheduled = {"type": "PodScheduled", "status": "False", "reason": "Unschedulable", "message": "0/1 nodes fit"}
    for pod in cluster.pods.values():
        pod["status"] = {"conditions": [scheduled | {"lastTransitionTime": world.now.isoformat()}]}
    cluster.nodes["n"] = {
        "metadata": {"name": "n", "labels": {"karpenter.sh/capacity-type": "on-demand"}},
        "spec": {"taints": [{"key": "node.kubernetes.io/unschedulable", "effect": "NoSchedule"}]},
        "status": {"conditions": [{"type": "Ready", "status": "True"}]},
    }
    await world.reconciler.reconcile(KEY)
    assert "1 on-demand node is cordoned: kubectl uncordon gives it back" in world.status["message"]
