"""An operator that runs in this process, on a cluster in memory."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Callable
from dataclasses import dataclass
from datetime import UTC, datetime

import aiohttp
from benchmarks.ports import free_ports

from operator_world import KEY, job
from pod_tokens import pod_token
from spottrain_api.contract.assignments import AgentReport
from spottrain_api.contract.names import TOKEN_AUDIENCE
from spottrain_operator.control_api.cluster_keys import ClusterKeys
from spottrain_operator.kube.errors import ClusterError
from spottrain_operator.kube.identities import JobKey, PodIdentity
from spottrain_operator.kube.lease import LeaderElection, LeaseSettings
from spottrain_operator.kube.resources import LEASES, Manifest
from spottrain_operator.kube.scope import Scope
from spottrain_operator.process import Operator, OperatorSettings
from world.cluster import MemoryCluster
from world.faults import Request

SYSTEM = "system"
ALL = Scope()


class LeaseAway(MemoryCluster):
    """A cluster whose API server answers nothing about leases while it is away."""

    def __init__(self) -> None:
        super().__init__()
        self.is_away = False
        self.num_tries_away = 0
        self.before.append(self._has_no_lease)

    async def _has_no_lease(self, request: Request) -> None:
        if self.is_away and request[:2] == ("get", LEASES):
            self.num_tries_away += 1
            raise ClusterError("connection refused")


@dataclass
class Running:
    cluster: LeaseAway
    task: asyncio.Task[None]
    settings: OperatorSettings

    async def is_ready(self) -> bool:
        try:
            url = f"http://127.0.0.1:{self.settings.health_port}/readyz"
            async with aiohttp.ClientSession() as session, session.get(url) as answer:
                return answer.status == 200
        except aiohttp.ClientConnectionError:  # it does not listen yet
            return False

    async def answer_to_agents(self) -> int | None:
        """The status that an agent without a token gets; None if the kernel refuses it."""
        try:
            url = f"https://127.0.0.1:{self.settings.port}/v1/assignment"
            async with aiohttp.ClientSession() as session, session.get(url, ssl=False) as answer:
                return answer.status
        except aiohttp.ClientConnectorError:
            return None

    async def report_until(self, condition: Callable[[], bool], pod: str, **state: object) -> None:
        """Report as the agent of a pod does, again and again."""
        uid = self.cluster.pods[KEY.namespace, pod]["metadata"]["uid"]
        identity = PodIdentity(namespace=KEY.namespace, pod=pod, uid=uid)
        token = pod_token(identity)
        self.cluster.tokens[token, TOKEN_AUDIENCE] = identity
        values = {"pod": pod, "pod_uid": uid, "warm": True, "rendezvous_port": 4000, "sent_at": datetime.now(UTC)}
        body, headers = AgentReport.model_validate(values | state).to_json(), {"Authorization": f"Bearer {token}"}
        url = f"https://127.0.0.1:{self.settings.port}/v1/report"
        async with asyncio.timeout(20), aiohttp.ClientSession(headers=headers) as session:
            while not condition():
                async with session.post(url, data=body, ssl=False):
                    await asyncio.sleep(0.01)

    def run_pods(self) -> None:
        """Let all pods be up, each on a node of its own."""
        at = datetime.now(UTC).isoformat()
        conditions = [
            {"type": each, "status": "True", "lastTransitionTime": at} for each in ("PodScheduled", "Ready")
        ]
        for (_, name), pod in self.cluster.pods.items():
            node = {"metadata": {"name": f"node-of-{name}"}, "spec": {}}
            self.cluster.put_node(node | {"status": {"conditions": [{"type": "Ready", "status": "True"}]}})
            pod["spec"]["nodeName"] = f"node-of-{name}"
            containers = [{"name": "trainer", "ready": True, "state": {"running": {"startedAt": at}}}]
            status = {"phase": "Running", "podIP": "127.9.0.1", "conditions": conditions}
            pod["status"] = status | {"containerStatuses": containers}

    def apply(self, name: str) -> None:
        manifest = job(checkpoint={"uri": f"s3://bucket/{name}"})
        self.cluster.put_job(manifest | {"metadata": manifest["metadata"] | {"name": name}})

    def num_pods(self, name: str) -> int:
        return sum(pod.startswith(f"{name}-") for _, pod in self.cluster.pods)

    def status(self, name: str) -> Manifest:
        found: Manifest = self.cluster.jobs[JobKey(namespace=KEY.namespace, name=name)]["status"]
        return found

    def place(self, name: str, *, on: str, taint: str) -> None:
        """Let the first pod of a job have been for long on a node, which has a taint now."""
        node = {"metadata": {"name": on}, "spec": {"taints": [{"key": taint, "effect": "NoSchedule"}]}}
        self.cluster.put_node(node | {"status": {"conditions": [{"type": "Ready", "status": "True"}]}})
        pod = self.cluster.pods[KEY.namespace, f"{name}-1"]
        pod["spec"]["nodeName"] = on
        placed = {"type": "PodScheduled", "status": "True", "lastTransitionTime": "2026-01-01T00:00:00Z"}
        pod.setdefault("status", {})["conditions"] = [placed]

    async def until(self, condition: Callable[[], bool]) -> None:
        async with asyncio.timeout(20):
            while not condition():
                assert not self.task.done(), self.task
                await asyncio.sleep(0.01)

    async def until_pods(self, name: str, number: int) -> None:
        await self.until(lambda: self.num_pods(name) == number)

    async def keep_trying(self, times: int) -> None:
        """Wait until the operator has asked for its lease so many times in vain."""
        before = self.cluster.num_tries_away
        await self.until(lambda: self.cluster.num_tries_away > before + times)

    async def until_measured(self, names: set[str], by: str = "") -> None:
        """Wait until the jobs with metrics are these, or those with the metric `by`."""
        url, found = f"http://127.0.0.1:{self.settings.metrics_port}/metrics", None
        async with asyncio.timeout(20), aiohttp.ClientSession() as session:
            while found != names:
                async with session.get(url) as answer:
                    found = set(re.findall(rf'{by}.*job_name="([^"]+)"', await answer.text()))

    async def until_ready(self, expected: bool) -> None:
        async with asyncio.timeout(20):
            while await self.is_ready() is not expected:  # noqa: ASYNC110
                await asyncio.sleep(0.01)


def settings_of(identity: str, scope: Scope = ALL) -> OperatorSettings:
    ports = free_ports(3)
    return OperatorSettings(
        control_url="https://127.0.0.1:1",
        lease=LeaseSettings(
            namespace=SYSTEM,
            identity=identity,
            duration_seconds=2,
            renew_deadline_seconds=0.5,
            retry_seconds=0.02,
            scope=scope,
        ),
        host="127.0.0.1",
        port=ports[0],
        health_port=ports[1],
        metrics_port=ports[2],
    )


def begin(settings: OperatorSettings, cluster: LeaseAway, stop: asyncio.Event) -> asyncio.Task[None]:
    election = LeaderElection(cluster, settings.lease)
    return asyncio.create_task(Operator(settings, cluster, ClusterKeys(cluster.get_raw), election).run(stop))
