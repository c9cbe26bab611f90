"""The election in a thread of its own: a busy process keeps its lease."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest

from spottrain_operator.kube.election_thread import ElectionThread
from spottrain_operator.kube.errors import ClusterError
from spottrain_operator.kube.lease import LEASE_NAME, LeaseSettings
from world.cluster import MemoryCluster
from world.faults import WRITES, Request

SETTINGS = LeaseSettings(
    namespace="system", identity="a", duration_seconds=2, renew_deadline_seconds=0.5, retry_seconds=0.02
)


@asynccontextmanager
async def opened(cluster: MemoryCluster) -> AsyncIterator[MemoryCluster]:
    yield cluster


def holder(cluster: MemoryCluster) -> str:
    return str(cluster.leases["system", LEASE_NAME]["spec"]["holderIdentity"])


async def test_a_loop_that_is_busy_for_longer_than_the_deadline_keeps_the_lease() -> None:
    cluster = MemoryCluster()
    renewals: list[str] = []

    async def count(request: Request) -> None:
        if request.verb in WRITES:
            renewals.append(request.verb)

    cluster.before.append(count)
    async with ElectionThread(SETTINGS, lambda: opened(cluster)) as election:
        await election.acquire()
        holding = asyncio.create_task(election.hold())
        await asyncio.sleep(0)
        begun, renewed = time.monotonic(), len(renewals)
        while time.monotonic() < begun + 2 * SETTINGS.renew_deadline_seconds or len(renewals) < renewed + 3:
            assert time.monotonic() < begun + 60, "the lease is not renewed"
            time.sleep(0.01)  # noqa: ASYNC251 — no step of this loop
        await asyncio.sleep(0)
        assert election.is_leader
        assert not holding.done()
        holding.cancel()
        await asyncio.wait({holding})
        await election.release()
        assert holder(cluster) == ""


async def test_a_lease_that_is_lost_is_lost_here_too() -> None:
    cluster = MemoryCluster()
    async with ElectionThread(SETTINGS, lambda: opened(cluster)) as election:
        await election.acquire()
        holding = asyncio.create_task(election.hold())
        cluster.leases["system", LEASE_NAME]["spec"] |= {"holderIdentity": "b"}
        await asyncio.wait_for(holding, 20)
        assert not election.is_leader
        assert await asyncio.wait_for(election.regain(), 20) is False
    assert holder(cluster) == "b"


async def test_without_a_cluster_the_process_is_named() -> None:
    @asynccontextmanager
    async def nowhere() -> AsyncIterator[MemoryCluster]:
        raise ClusterError("no cluster is configured")
        yield MemoryCluster()

    with pytest.raises(ClusterError, match="no cluster is configured"):
        async with ElectionThread(SETTINGS, nowhere):
            pass
