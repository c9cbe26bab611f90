"""Passes over a job that is deleted, or that another release leads."""

from __future__ import annotations

import pytest

from operator_world import KEY, CrashingCluster, World, job
from spottrain_api.contract.assignments import AssignmentAction
from spottrain_operator.kube.identities import JobKey


async def test_a_job_that_is_gone_takes_its_pods_and_metrics_along() -> None:
    cluster = CrashingCluster()
    cluster.put_job(job())
    world = World(cluster)
    await world.turn()
    assert b'job_name="gpt"' in world.metrics.exposition()[0]
    del cluster.jobs[KEY]
    result = await world.reconciler.reconcile(KEY)
    assert result.gone
    cluster.finish_deletions()
    assert cluster.pods == {}
    assert b'job_name="gpt"' not in world.metrics.exposition()[0]


FINALIZED = {"deletionTimestamp": "2026-01-01T00:00:00Z", "finalizers": ["example.com/audit"]}


async def test_a_job_that_somebodys_finalizer_keeps_takes_its_pods_and_metrics_along() -> None:
    cluster = CrashingCluster()
    cluster.put_job(job())
    world = World(cluster, last_step=10_000)
    await world.until_running()
    pods = [pod["metadata"]["uid"] for pod in cluster.pods.values()]
    cluster.jobs[KEY]["metadata"] |= FINALIZED
    trains: list[bool] = []

    async def published(*, trains: bool, found: list[bool] = trains) -> None:
        found.append(trains)
        for uid in pods:
            told = await world.board.next(uid, after=None, timeout_seconds=0)
            assert told is not None
            assert told.action is AssignmentAction.EXIT
        assert cluster.deleted == set()

    result = await world.reconciler.reconcile(KEY, published)
    assert (trains, result.gone, len(cluster.deleted)) == ([False], False, len(pods))
    cluster.finish_deletions()
    assert cluster.pods == {}
    writes = cluster.num_writes
    for _ in range(2):
        assert (await world.reconciler.reconcile(KEY)).gone
    assert b'job_name="gpt"' not in world.metrics.exposition()[0]
    assert (world.status["generation"]["state"], cluster.num_writes) == ("Ended", writes)


async def test_agents_of_orphaned_pods_exit_and_their_pods_stay() -> None:
    """Kubernetes takes the job from its pods one by one, before it deletes it."""
    cluster = CrashingCluster()
    cluster.put_job(job())
    world = World(cluster, last_step=10_000)
    await world.until_running()
    cluster.jobs[KEY]["metadata"] |= FINALIZED | {"finalizers": ["orphan"]}
    first, *others = cluster.pods.values()
    for orphaned in ([first], others, []):
        for pod in orphaned:
            del pod["metadata"]["ownerReferences"]
        await world.reconciler.reconcile(KEY)
        for pod in (first, *others):
            told = await world.board.next(pod["metadata"]["uid"], after=None, timeout_seconds=0)
            assert told is not None
            assert told.action is AssignmentAction.EXIT
            assert world.reports.knows(pod["metadata"]["uid"]), "it may ask"
    del cluster.jobs[KEY]
    await world.reconciler.reconcile(KEY)
    assert all(world.board.has_decided(pod["metadata"]["uid"]) for pod in cluster.pods.values())
    assert (len(cluster.pods), cluster.deleted) == (3, set())


async def test_pods_of_a_job_that_is_gone_are_deleted_once() -> None:
    cluster = CrashingCluster()
    cluster.put_job(job())
    world = World(cluster)
    while not cluster.pods or any("nodeName" not in pod["spec"] for pod in cluster.pods.values()):
        await world.turn()
    del cluster.jobs[KEY]
    before = cluster.num_writes
    for _ in range(2):
        await world.reconciler.reconcile(KEY)
    assert cluster.num_writes == before + len(cluster.pods)


@pytest.mark.parametrize("for_good", [False, True])
async def test_a_job_that_another_release_leads_leaves_reports_and_assignments_for_its_return_alone(
    for_good: bool,
) -> None:
    cluster = CrashingCluster()
    cluster.put_job(job())
    world = World(cluster)
    await world.until_running()
    pods = [pod["metadata"]["uid"] for pod in cluster.pods.values()]
    assert all(world.reports.knows(uid) and world.board.has_decided(uid) for uid in pods)
    world.reconciler.leave(KEY, None if for_good else cluster.jobs[KEY])
    assert [world.reports.knows(uid) for uid in pods] == [not for_good] * len(pods)
    assert [world.board.has_decided(uid) for uid in pods] == [not for_good] * len(pods)
    assert (world.metrics.jobs, cluster.deleted) == (set(), set())


async def test_jobs_that_another_release_led_keep_their_order_at_a_folder_whichever_pass_comes_first() -> None:
    cluster = CrashingCluster()
    world = World(cluster)
    older, younger, elsewhere = KEY, KEY._replace(name="younger"), KEY._replace(namespace="elsewhere")

    def put(key: JobKey, created_at: str) -> None:
        meta = {"namespace": key.namespace, "name": key.name, "creationTimestamp": created_at}
        cluster.put_job(job() | {"metadata": meta})

    put(elsewhere, "2026-01-01T00:00:00Z")
    await world.reconciler.reconcile(elsewhere)
    put(older, "2026-01-01T00:01:00Z")
    put(younger, "2026-01-01T00:02:00Z")
    for key in (older, younger):
        world.reconciler.leave(key, cluster.jobs[key])
    await world.reconciler.reconcile(younger)
    assert "is the folder of the unfinished job team/gpt" in cluster.jobs[younger]["status"]["message"]
    assert {namespace for namespace, _ in cluster.pods} == {"elsewhere"}
