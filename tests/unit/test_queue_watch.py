"""The watch of Workloads: a cluster may not have them, and a change of one concerns its job."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

import pytest

from spottrain_api.contract.names import LABEL_JOB, LABEL_MANAGED_BY, MANAGED_BY
from spottrain_operator.controller import Priority
from spottrain_operator.kube.cache import Change
from spottrain_operator.kube.errors import NotFoundError
from spottrain_operator.kube.identities import JobKey
from spottrain_operator.kube.resources import WORKLOADS, Manifest, Resource
from spottrain_operator.objects.watched_cluster import WatchedCluster
from spottrain_operator.wakes import wakes
from world.cluster import MemoryCluster
from world.faults import Fault

LABELS = {LABEL_JOB: "gpt", LABEL_MANAGED_BY: MANAGED_BY}


def workload(name: str, labels: dict[str, str] = LABELS) -> Manifest:
    return {"metadata": {"namespace": "team", "name": name, "labels": labels}, "spec": {"podSets": []}}


class Watching:
    """A client with caches, and the jobs that changes have woken."""

    def __init__(self, cluster: MemoryCluster) -> None:
        self.woken: list[tuple[JobKey, Priority]] = []
        self.cluster, self.client = cluster, WatchedCluster(cluster, self._changed, optional=[WORKLOADS])

    def _changed(self, resource: Resource, change: Change) -> None:
        if resource == WORKLOADS:
            self.woken += wakes(resource, change, lambda _node: set())

    async def names(self) -> list[str]:
        found = await self.client.list(WORKLOADS, namespace="team", labels={LABEL_JOB: "gpt"})
        return [each["metadata"]["name"] for each in found.items]

    async def until(self, condition: Callable[[], bool]) -> None:
        async with asyncio.timeout(20):
            while not condition():  # noqa: ASYNC110
                await asyncio.sleep(0.001)


@asynccontextmanager
async def watching(cluster: MemoryCluster) -> AsyncIterator[Watching]:
    """One that has its first lists of all that every cluster has."""
    made, synced = Watching(cluster), asyncio.Event()
    following = asyncio.create_task(made.client.follow(synced))
    try:
        async with asyncio.timeout(20):
            await synced.wait()
        yield made
    finally:
        following.cancel()
        await asyncio.wait({following})


async def test_an_operator_is_ready_without_kueue_and_asks_seldom_for_it() -> None:
    cluster = MemoryCluster()
    lacking = Fault(resource=WORKLOADS, error=NotFoundError("no such resource"))
    cluster.before.append(lacking)
    async with watching(cluster) as seen:
        await seen.until(lambda: lacking.num > 0)
        before = lacking.num
        for _ in range(10):
            with pytest.raises(NotFoundError):
                await seen.names()
        assert lacking.num == before, "no pass asks the API server"


async def test_a_change_of_a_workload_wakes_its_job_alone() -> None:
    cluster = MemoryCluster()
    cluster.workloads["team", "mine"] = workload("mine")
    cluster.workloads["team", "other"] = workload("other", {"app": "else"})
    async with watching(cluster) as seen:
        await seen.until(lambda: bool(seen.woken))
        assert await seen.names() == ["mine"]
        before = len(seen.woken)
        status = {"conditions": [{"type": "Admitted", "status": "True", "reason": "Admitted", "message": ""}]}
        for each in cluster.workloads.values():
            each["status"] = status
        await seen.until(lambda: len(seen.woken) > before)
        assert set(seen.woken) == {(JobKey(namespace="team", name="gpt"), Priority.NORMAL)}


async def test_reads_show_own_writes_at_once_and_own_writes_wake_nobody() -> None:
    cluster = MemoryCluster()
    async with watching(cluster) as seen:
        await seen.until(lambda: seen.client._has.get(WORKLOADS, False))
        made = await seen.client.create(WORKLOADS, workload("mine"))
        assert await seen.names() == ["mine"]
        assert not seen.woken
        await seen.client.delete(WORKLOADS, "mine", namespace="team", uid=made["metadata"]["uid"])
        assert await seen.names() == []
