"""Simulated scheduler, kubelets and cloud autoscaler.

Each new pod gets its own node, and runs at once. The driver uses the API alone, as these programs do. KWOK and
kube-scheduler would do the same, but they would take processor time from what is measured on two cores.
"""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Callable
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any

from benchmarks.scale.api_server import NAMESPACE, ApiServer
from spottrain_api.contract.names import LABEL_CAPACITY_TYPE, LABEL_MANAGED_BY, MANAGED_BY, TOKEN_AUDIENCE
from spottrain_local.node.api import UNREACHABLE, ApiError, list_and_watch
from world.kubelets import running, timestamp

NODES = "/api/v1/nodes"
HEARTBEAT_SECONDS = 300.0
NUM_AT_ONCE = 15
# Real nodes name the images that they hold, which makes most of their size.
IMAGES = [
    {"names": [f"registry.example/team/image-{number}@sha256:{number:064x}"], "sizeBytes": 10**9 + number}
    for number in range(50)
]


@dataclass(frozen=True, slots=True, kw_only=True)
class RunningPod:
    """A pod that has just started, and the token with which its agent speaks for it."""

    name: str
    uid: str
    node: str
    token: str

    @property
    def job(self) -> str:
        return self.name.rpartition("-")[0]


class Kubelets:
    """Binds, runs and ends the pods of one namespace.

    `started` and `ended` report each pod. `free_nodes` can be replaced, so that pods wait for a node.
    """

    def __init__(
        self,
        server: ApiServer,
        started: Callable[[RunningPod], None],
        ended: Callable[[str], None],
        namespace: str = NAMESPACE,
    ) -> None:
        self._client = server.client
        self._pods = f"/api/v1/namespaces/{namespace}/pods"
        self._tokens = f"/api/v1/namespaces/{namespace}/serviceaccounts/default/token"
        self._started = started
        self._ended = ended
        self._known: set[str] = set()
        self._work: set[asyncio.Task[None]] = set()
        # The client's time limit counts from here, not from the end of a queue of thousands.
        self._places = asyncio.Semaphore(NUM_AT_ONCE)
        self.free_nodes = asyncio.Semaphore(sys.maxsize)
        self.nodes: list[str] = []
        self.errors: list[str] = []

    async def run(self) -> None:
        """Follow the pods until cancelled."""
        selector = f"{LABEL_MANAGED_BY}={MANAGED_BY}"
        async for event in list_and_watch(self._client, self._pods, labelSelector=selector):
            if event["type"] == "SYNC":
                for pod in event["items"]:
                    self._saw(pod)
            elif event["type"] != "DELETED":
                self._saw(event["object"])

    async def keep_nodes_alive(self) -> None:
        """Renew each node's status every five minutes, as kubelets do."""
        while True:
            nodes = list(self.nodes)
            for name in nodes:
                now = timestamp(datetime.now(UTC))
                status = {"conditions": [{"type": "Ready", "status": "True", "lastHeartbeatTime": now}]}
                self._spawn(self._patch(f"{NODES}/{name}/status", {"status": status}))
                await asyncio.sleep(HEARTBEAT_SECONDS / len(nodes))
            await asyncio.sleep(0.1)

    def _saw(self, pod: dict[str, Any]) -> None:
        meta = pod["metadata"]
        if "deletionTimestamp" in meta:
            self._spawn(self._end(meta["name"], meta["uid"]))
        elif meta["uid"] not in self._known:
            self._known.add(meta["uid"])
            self._spawn(self._begin(pod))

    def _spawn(self, work: Any) -> None:
        task = asyncio.create_task(self._guarded(work))
        self._work.add(task)
        task.add_done_callback(self._work.discard)

    async def _guarded(self, work: Any) -> None:
        try:
            async with self._places:
                await work
        except ApiError as error:  # a pod may go while it starts
            if error.status not in (404, 409):
                self.errors.append(str(error))
        except UNREACHABLE as error:
            self.errors.append(repr(error))

    async def _begin(self, pod: dict[str, Any]) -> None:
        meta = pod["metadata"]
        name, node = meta["name"], f"node-{meta['name']}"
        await self.free_nodes.acquire()
        await self._client.create(NODES, _node(node, meta["labels"][LABEL_CAPACITY_TYPE]))
        self.nodes.append(node)
        target = {"apiVersion": "v1", "kind": "Node", "name": node}
        await self._client.create(f"{self._pods}/{name}/binding", {"metadata": {"name": name}, "target": target})
        await self._patch(f"{self._pods}/{name}/status", {"status": running(datetime.now(UTC))})
        reference = {"apiVersion": "v1", "kind": "Pod", "name": name, "uid": meta["uid"]}
        answer = await self._client.create(
            self._tokens,
            {"spec": {"audiences": [TOKEN_AUDIENCE], "boundObjectRef": reference, "expirationSeconds": 3600}},
        )
        self._started(RunningPod(name=name, uid=meta["uid"], node=node, token=answer["status"]["token"]))

    async def _end(self, name: str, uid: str) -> None:
        self._ended(uid)
        await self._client.delete(f"{self._pods}/{name}", {"gracePeriodSeconds": 0, "preconditions": {"uid": uid}})
        node = f"node-{name}"
        if node in self.nodes:
            self.nodes.remove(node)
            self.free_nodes.release()
            await self._client.delete(f"{NODES}/{node}")

    async def _patch(self, path: str, body: dict[str, Any]) -> None:
        await self._client.patch(path, body)


def _node(name: str, capacity_type: str) -> dict[str, Any]:
    """A node as EKS makes it, of the size that real ones have."""
    labels = {
        "eks.amazonaws.com/capacityType": "SPOT" if capacity_type == "spot" else "ON_DEMAND",
        "kubernetes.io/hostname": name,
        "kubernetes.io/os": "linux",
        "node.kubernetes.io/instance-type": "p5.48xlarge",
        "topology.kubernetes.io/zone": "us-east-1a",
    }
    now = timestamp(datetime.now(UTC))
    amounts = {"cpu": "192", "memory": "2048Gi", "pods": "110", "nvidia.com/gpu": "8"}
    condition = {"lastHeartbeatTime": now, "lastTransitionTime": now, "reason": "Bench", "message": "simulated"}
    conditions = [
        {"type": "Ready", "status": "True", **condition},
        *({"type": kind, "status": "False", **condition} for kind in ("MemoryPressure", "DiskPressure")),
    ]
    status = {"capacity": amounts, "allocatable": amounts, "conditions": conditions, "images": IMAGES}
    return {"metadata": {"name": name, "labels": labels}, "status": status}
