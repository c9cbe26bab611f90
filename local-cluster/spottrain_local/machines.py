"""Nodes as processes.

The module writes each node's configuration, starts and kills the node, and deletes its objects.
"""

import asyncio
import json
import logging
import shutil
import sys
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from spottrain_local.address import NetworkClaim, free_port
from spottrain_local.binaries import STREAMS
from spottrain_local.cloud import Instance
from spottrain_local.controlplane import ControlPlane
from spottrain_local.layout import write_atomically
from spottrain_local.metadata.interruption import Interruption
from spottrain_local.node.api import UNREACHABLE, ApiClient, ApiError
from spottrain_local.node.pod_network import METADATA_IP
from spottrain_local.node.process import main as node_main
from spottrain_local.podman import remove_leftovers
from spottrain_local.processes import ChildProcess, ProcessSpec, start_process
from spottrain_local.shapes import node_shape
from spottrain_local.spec import NodePool

logger = logging.getLogger(__name__)

KUBELET_PORT = 10250
METADATA_PORT = 8169
RETRY_SECONDS = 0.5


@dataclass(frozen=True, slots=True, kw_only=True)
class PodSurroundings:
    """The environment of pods on every node of this cluster.

    `gateway` is that of containers; processes have none.
    """

    gateway: str = ""
    preload_library: Path | None
    env: dict[str, str]
    working_dir: Path


class NodeProcesses:
    """The local cluster's `Machines`: one node process for each instance."""

    def __init__(
        self,
        *,
        pools: dict[str, NodePool],
        control_plane: ControlPlane,
        client: ApiClient,
        network: NetworkClaim,
        surroundings: PodSurroundings,
    ) -> None:
        self._pools = pools
        self._index = {name: index for index, name in enumerate(pools)}
        self._control_plane = control_plane
        self._layout = control_plane.layout
        self._client = client
        self._network = network
        self._surroundings = surroundings
        self._processes: dict[str, ChildProcess] = {}

    def pid(self, node: str) -> int | None:
        """Return the process id of a node that runs."""
        process = self._processes.get(node)
        return process.pid if process else None

    def start(self, instance: Instance) -> None:
        """See `Machines`."""
        node = instance.node
        folder = self._layout.node(node)
        folder.mkdir(parents=True, exist_ok=True)
        config = self._layout.pki / f"node-{node}.json"
        write_atomically(config, json.dumps(self._config(instance), indent=1))
        process = ChildProcess(
            ProcessSpec(
                name=f"node {node}",
                main=partial(node_main, config),
                log_file=self._layout.logs / f"node-{node}.log",
                stop_seconds=15.0,
            )
        )
        self._processes[node] = process
        process.start()

    async def kill(self, node: str) -> None:
        """See `Machines`."""
        process = self._processes.pop(node, None)
        if process:
            await process.stop(kill=True)
        if self._surroundings.gateway:
            await self._remove_containers(node)

    async def _remove_containers(self, node: str) -> None:
        """Remove what podman still knows of a node whose containers have ended with it."""
        spec = ProcessSpec(
            name=f"containers of {node}",
            main=partial(_remove_leftovers, self._network.number, node),
            log_file=self._layout.logs / f"node-{node}.log",
        )
        await (await start_process(spec)).wait()

    async def stop_all(self) -> None:
        """Shut all nodes down in order, as machines are shut down."""
        await asyncio.gather(*(process.stop() for process in self._processes.values()))
        self._processes.clear()

    def erase(self, node: str) -> None:
        """See `Machines`."""
        shutil.rmtree(self._layout.node(node), ignore_errors=True)

    def announce(self, node: str, interruption: Interruption | None) -> None:
        """See `Machines`."""
        path = self._layout.node(node) / "interruption.json"
        if interruption is None:
            path.unlink(missing_ok=True)
        else:
            path.parent.mkdir(parents=True, exist_ok=True)
            write_atomically(path, interruption.model_dump_json(by_alias=True))

    async def forget(self, node: str, *, with_pods: bool) -> None:
        """See `Machines`. It retries while the API server does not answer."""
        while True:
            try:
                if with_pods:
                    await self._delete_pods_of(node)
                await self._delete(f"/api/v1/nodes/{node}")
                return
            except (ApiError, *UNREACHABLE) as error:
                logger.warning("deleting the Node %s: %s; trying again", node, error)
                await asyncio.sleep(RETRY_SECONDS)

    async def forget_strangers(self) -> None:
        """Delete Node objects that have no node in this cluster any more."""
        nodes = await self._client.get("/api/v1/nodes")
        for node in nodes.get("items") or []:
            if node["metadata"]["name"] not in self._pools:
                await self.forget(node["metadata"]["name"], with_pods=True)

    async def _delete_pods_of(self, node: str) -> None:
        pods = await self._client.get("/api/v1/pods", fieldSelector=f"spec.nodeName={node}")
        for pod in pods.get("items") or []:
            metadata = pod["metadata"]
            await self._delete(f"/api/v1/namespaces/{metadata['namespace']}/pods/{metadata['name']}", metadata["uid"])

    async def _delete(self, path: str, uid: str | None = None) -> None:
        """Delete an object at once.

        An object that is gone or was replaced is not an error.
        """
        options: dict[str, Any] = {"apiVersion": "v1", "kind": "DeleteOptions", "gracePeriodSeconds": 0}
        if uid:
            options["preconditions"] = {"uid": uid}
        try:
            await self._client.delete(path, options)
        except ApiError as error:
            if error.status not in (404, 409):
                raise

    def _config(self, instance: Instance) -> dict[str, Any]:
        """Return the node's configuration. See `spottrain_local.node.config`."""
        node, pool, index = instance.node, self._pools[instance.node], self._index[instance.node]
        pki, authority = self._layout.pki, self._control_plane.credentials.authority
        ip = self._network.node_ip(index)
        identity = authority.issue(pki / f"node-{node}", f"system:node:{node}", organizations=["system:nodes"])
        serving = authority.issue(pki / f"node-{node}-serving", node, addresses=[ip], names=[node])
        shape = node_shape(
            name=node,
            pool=pool.name,
            provider=pool.provider,
            capacity_type=pool.capacity_type,
            instance_type=pool.chosen_instance_type,
            zone=pool.chosen_zone,
            gpus=pool.gpus,
        )
        return {
            "name": node,
            "provider": pool.provider,
            "capacityType": pool.capacity_type,
            "instanceType": pool.chosen_instance_type,
            "instanceID": instance.instance_id,
            "zone": pool.chosen_zone,
            "gpus": pool.gpus,
            "cpu": pool.chosen_cpu,
            "memory": pool.chosen_memory,
            "labels": shape.labels | pool.labels,
            "taints": [*shape.taints, *(taint.model_dump() for taint in pool.taints)],
            "nodeIP": ip,
            "podNetwork": self._network.pod_network(index),
            "podEnv": self._surroundings.env,
            "streamsProgram": self._streams_program(),
            **self._runtime_config(ip),
            "apiserver": self._control_plane.server,
            "caFile": str(authority.certificate_file),
            "clientCAFile": str(authority.certificate_file),
            "clientCertFile": str(identity.certificate),
            "clientKeyFile": str(identity.key),
            "servingCertFile": str(serving.certificate),
            "servingKeyFile": str(serving.key),
            "stateDir": str(self._layout.node(node)),
        }

    def _streams_program(self) -> str | None:
        program = self._control_plane.binaries.find(STREAMS)
        return str(program) if program else None

    def _runtime_config(self, ip: str) -> dict[str, Any]:
        around = self._surroundings
        if around.gateway:
            port = self._control_plane.ports["apiserver"]
            return {
                "runtime": "podman",
                "network": self._network.number,
                "gateway": around.gateway,
                "podApiserver": f"https://{around.gateway}:{port}",
                # A node has a network namespace of its own, in which every port is free.
                "kubeletPort": KUBELET_PORT,
                "metadataIP": METADATA_IP,
                "metadataPort": 80,
            }
        return {
            "runtime": "process",
            "kubeletPort": free_port(ip, KUBELET_PORT),
            "metadataPort": free_port(ip, METADATA_PORT),
            "hostsFile": str(self._layout.hosts),
            "preloadLibrary": str(around.preload_library) if around.preload_library else None,
            "workingDir": str(around.working_dir),
            "pathPrefix": str(Path(sys.executable).parent),
        }


def _remove_leftovers(network: int, node: str) -> int:
    try:
        remove_leftovers(network, node)
    except OSError as error:
        logger.error("node %s: %s", node, error)
        return 1
    return 0
