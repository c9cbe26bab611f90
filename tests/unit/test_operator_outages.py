"""The operator while the API server is away for longer than its lease lasts."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass

import aiohttp
import pytest

from memory_cluster import MemoryCluster
from operator_process import free_port
from operator_world import KEY, job
from spottrain_operator.cluster.client import ClusterError, Manifest
from spottrain_operator.cluster.lease import LEASE_NAME, LeaseSettings
from spottrain_operator.process import LeadershipLostError, Operator, OperatorSettings

SYSTEM = "system"


class LeaseAway(MemoryCluster):
    """A cluster whose API server answers nothing about leases while it is away."""

    def __init__(self) -> None:
        super().__init__()
        self.is_away = False
        self.num_tries_away = 0

    async def read_lease(self, namespace: str, name: str) -> Manifest | None:
        if self.is_away:
            self.num_tries_away += 1
            raise ClusterError("connection refused")
        return await super().read_lease(namespace, name)


@dataclass
class Running:
    cluster: LeaseAway
    task: asyncio.Task[None]
    health_url: str

    async def is_ready(self) -> bool:
        try:
            async with aiohttp.ClientSession() as session, session.get(self.health_url) as answer:
                return answer.status == 200
        except aiohttp.ClientConnectionError:  # it does not listen yet
            return False

    def apply(self, name: str) -> None:
        manifest = job(checkpoint={"uri": f"s3://bucket/{name}"})
        self.cluster.put_job(manifest | {"metadata": manifest["metadata"] | {"name": name}})

    def num_pods(self, name: str) -> int:
        return sum(pod.startswith(f"{name}-") for _, pod in self.cluster.pods)

    async def until(self, condition: Callable[[], bool]) -> None:
        async with asyncio.timeout(20):
            while not condition():
                assert not self.task.done(), self.task
                await asyncio.sleep(0.01)

    async def until_ready(self, expected: bool) -> None:
        async with asyncio.timeout(20):
            while await self.is_ready() is not expected:  # noqa: ASYNC110
                await asyncio.sleep(0.01)


def settings_of(identity: str) -> OperatorSettings:
    ports = [free_port() for _ in range(3)]
    return OperatorSettings(
        control_url="https://127.0.0.1:1",
        lease=LeaseSettings(
            namespace=SYSTEM, identity=identity, duration_seconds=2, renew_deadline_seconds=0.5, retry_seconds=0.02
        ),
        host="127.0.0.1",
        port=ports[0],
        health_port=ports[1],
        metrics_port=ports[2],
    )


@pytest.fixture
async def operator() -> AsyncIterator[Running]:
    cluster, settings = LeaseAway(), settings_of("a")
    stop = asyncio.Event()
    task = asyncio.create_task(Operator(settings, cluster, cluster).run(stop))  # type: ignore[arg-type]
    running = Running(cluster, task, f"http://127.0.0.1:{settings.health_port}/readyz")
    running.apply(KEY.name)
    await running.until(lambda: running.num_pods(KEY.name) == 3)
    yield running
    stop.set()
    await asyncio.wait({task}, timeout=20)


async def test_a_leader_that_can_not_renew_stops_acting_and_leads_on_afterwards(operator: Running) -> None:
    cluster = operator.cluster
    cluster.is_away = True
    await operator.until_ready(False)
    operator.apply("later")
    before = cluster.num_tries_away
    await operator.until(lambda: cluster.num_tries_away > before + 20)
    assert operator.num_pods("later") == 0
    cluster.is_away = False
    await operator.until_ready(True)
    await operator.until(lambda: operator.num_pods("later") == 3)
    assert operator.num_pods(KEY.name) == 3
    assert cluster.leases[SYSTEM, LEASE_NAME]["spec"]["leaseTransitions"] == 0


async def test_a_leader_ends_if_another_has_led_meanwhile(operator: Running) -> None:
    cluster = operator.cluster
    cluster.is_away = True
    await operator.until_ready(False)
    cluster.leases[SYSTEM, LEASE_NAME]["spec"]["holderIdentity"] = "b"
    cluster.is_away = False
    with pytest.raises(LeadershipLostError):
        await asyncio.wait_for(operator.task, 20)


async def test_a_leader_ends_if_another_release_leads_its_namespaces_meanwhile(operator: Running) -> None:
    cluster = operator.cluster
    cluster.is_away = True
    await operator.until_ready(False)
    await cluster.write_lease(
        {
            "apiVersion": "coordination.k8s.io/v1",
            "kind": "Lease",
            "metadata": {"namespace": "another", "name": LEASE_NAME},
            "spec": {"holderIdentity": "b", "leaseDurationSeconds": 60},
        }
    )
    cluster.is_away = False
    with pytest.raises(LeadershipLostError):
        await asyncio.wait_for(operator.task, 20)
    assert cluster.leases[SYSTEM, LEASE_NAME]["spec"]["holderIdentity"] == ""


async def test_who_could_take_over_is_ready_but_refuses_agents(operator: Running) -> None:
    settings, stop = settings_of("b"), asyncio.Event()
    task = asyncio.create_task(Operator(settings, operator.cluster, operator.cluster).run(stop))  # type: ignore[arg-type]
    second = Running(operator.cluster, task, f"http://127.0.0.1:{settings.health_port}/readyz")
    try:
        async with aiohttp.ClientSession() as session, asyncio.timeout(20):
            await second.until_ready(True)
            with pytest.raises(aiohttp.ClientConnectorError):
                await session.get(f"https://127.0.0.1:{settings.port}/v1/assignment", ssl=False)
        assert operator.cluster.leases[SYSTEM, LEASE_NAME]["spec"]["holderIdentity"] == "a"
    finally:
        stop.set()
        await asyncio.wait({task}, timeout=20)
