"""A node's pods, from their binding to their deletion.

They are processes. The API server only takes notes.
"""

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, cast

from spottrain_local.node.api import ApiClient
from spottrain_local.node.cluster_objects import ApiObjectSource
from spottrain_local.node.config import NodeConfig
from spottrain_local.node.container_worker import PodContext
from spottrain_local.node.containers import PodSandbox
from spottrain_local.node.downward import PodPlace
from spottrain_local.node.events import EventRecorder
from spottrain_local.node.pod_worker import PodWorker
from spottrain_local.node.process_runtime import ProcessRuntime
from spottrain_local.node.shimmed_processes import ShimmedProcesses
from spottrain_local.node.volumes import PodVolumes

PLACE = PodPlace(node_name="n", pod_ip="127.16.4.2", host_ip="127.16.4.1", cpu="8", memory="32Gi")
FILES = ("caFile", "clientCertFile", "clientKeyFile", "servingCertFile", "servingKeyFile")


class NotedApi:
    """An `ApiClient` that knows no objects."""

    def __init__(self) -> None:
        self.phases: list[str] = []
        self.deleted: list[str] = []

    async def patch(self, path: str, body: dict[str, Any]) -> dict[str, Any]:
        self.phases.append(body["status"]["phase"])
        return body

    async def delete(self, path: str, body: dict[str, Any]) -> dict[str, Any]:
        self.deleted.append(path)
        return {}


def config(folder: Path) -> NodeConfig:
    files = dict.fromkeys(FILES, "unused")
    addresses = {"nodeIP": PLACE.host_ip, "podNetwork": "127.16.4.0/24", "apiserver": "https://127.0.0.1:1"}
    ports = {"kubeletPort": 1, "metadataPort": 2}
    return NodeConfig.model_validate(
        {"name": "n", "provider": "eks", "capacityType": "spot", "stateDir": str(folder)} | files | addresses | ports
    )


def pod(*containers: dict[str, Any], **spec: Any) -> dict[str, Any]:
    named = [{"name": f"c{number}"} | container for number, container in enumerate(containers)]
    metadata = {"name": "p", "namespace": "ns", "uid": "u"}
    return {"metadata": metadata, "spec": {"containers": named, "restartPolicy": "Never", **spec}}


@asynccontextmanager
async def worker(folder: Path, api: NotedApi, pod: dict[str, Any]) -> AsyncIterator[PodWorker]:
    """A worker that runs the pod."""
    directory, client = folder / "pods" / "u", cast(ApiClient, api)
    source = ApiObjectSource(client)
    context = PodContext(
        pod=pod,
        config=config(folder),
        place=PLACE,
        sandbox=PodSandbox(
            uid="u", namespace="ns", hostname="p", ip=PLACE.pod_ip, host_network=False, directory=directory
        ),
        directory=directory,
        volumes=PodVolumes(directory / "v", pod, PLACE, source),
        source=source,
        runtime=ProcessRuntime(ShimmedProcesses()),
        events=EventRecorder(client, "n"),
        changed=lambda: None,
    )
    found = PodWorker(context, client, ended=lambda: None)
    task = asyncio.create_task(found.run())
    try:
        yield found
    finally:
        found.removed()
        await asyncio.wait_for(task, 30)


async def until(condition: Callable[[], object]) -> None:
    async with asyncio.timeout(30):
        while True:
            if condition():
                break
            await asyncio.sleep(0.01)


async def test_a_pod_starts_when_the_disk_has_room_again(tmp_path: Path) -> None:
    api, in_the_way = NotedApi(), tmp_path / "pods"
    in_the_way.touch()
    async with worker(tmp_path, api, pod({"command": ["true"]})) as found:
        await until(lambda: api.phases)
        in_the_way.unlink()
        await until(lambda: "Succeeded" in api.phases)
        deletion = {"deletionTimestamp": "2026-01-01T00:00:00Z", "deletionGracePeriodSeconds": 1}
        found.update(found.context.pod | {"metadata": found.context.pod["metadata"] | deletion})
        await until(lambda: api.deleted)
