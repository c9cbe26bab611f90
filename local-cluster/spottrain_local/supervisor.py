"""The daemon behind one local cluster.

It starts the cluster's processes, keeps them running, and plays the cloud. `spottrain local up` starts it, and
`spottrain local down` ends it. Everything it starts dies with it.
"""

import asyncio
import contextlib
import fcntl
import json
import logging
import os
import signal
from collections.abc import AsyncIterator
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import click

from spottrain_local.address import CONTAINER_PREFIX, NetworkClaim, claim_network
from spottrain_local.binaries import CONTROL_PLANE, find_binaries
from spottrain_local.cloud import Cloud
from spottrain_local.cluster import PARTS
from spottrain_local.control_api import serve_control_api
from spottrain_local.controlplane import (
    PORT_NAMES,
    ControlPlane,
    issue_credentials,
    wait_until_ready,
    wait_until_served,
)
from spottrain_local.gateway import NameServer, serve_gateway
from spottrain_local.layout import ClusterLayout, LocalClusterError, unreadable_state, write_atomically
from spottrain_local.machines import NodeProcesses, PodSurroundings
from spottrain_local.metrics_server import PORT_NAME as METRICS_PORT_NAME
from spottrain_local.metrics_server import MetricsServer
from spottrain_local.names import find_preload_library, hosts_file
from spottrain_local.node.api import UNREACHABLE, ApiClient, ApiError, list_and_watch
from spottrain_local.objectstore import GRPC_PORT_NAMES, ObjectStore, remove_sockets
from spottrain_local.objectstore import PORT_NAMES as STORE_PORT_NAMES
from spottrain_local.podman import create_bridge, gateway_ip, is_network_free, remove_cluster, remove_dead_clusters
from spottrain_local.processes import ChildProcess, watch_children_by_pidfd
from spottrain_local.spec import ClusterSpec

logger = logging.getLogger(__name__)

NODES_POLL_SECONDS = 0.2
STATE_POLL_SECONDS = 2.0
NODE_LEASES = "/apis/coordination.k8s.io/v1/namespaces/kube-node-lease/leases"


class Supervisor:
    """One local cluster, from `run` until `stop` is requested."""

    def __init__(self, layout: ClusterLayout, spec: ClusterSpec, network: NetworkClaim, working_dir: Path) -> None:
        binaries = find_binaries(*CONTROL_PLANE, release=spec.kubernetes)
        ports = network.ports([*PORT_NAMES, *STORE_PORT_NAMES, *GRPC_PORT_NAMES, METRICS_PORT_NAME])
        self.layout = layout
        self.network = network
        self.in_containers = spec.runtime == "podman"
        self.kubernetes = spec.kubernetes
        gateway = gateway_ip(network.number) if self.in_containers else ""
        self.control_plane = ControlPlane(
            layout=layout,
            binaries=binaries,
            kubernetes=spec.kubernetes,
            credentials=issue_credentials(layout.pki, [gateway] if gateway else []),
            ports=ports,
        )
        self.name_server = NameServer()
        self.store = ObjectStore(layout=layout, ports=ports)
        self.client: ApiClient = self.control_plane.client()
        self.pools = spec.pool_of_nodes()
        self.nodes = NodeProcesses(
            pools=self.pools,
            control_plane=self.control_plane,
            client=self.client,
            network=network,
            surroundings=PodSurroundings(
                gateway=gateway,
                preload_library=None if gateway else find_preload_library(),
                env=self.store.environment(gateway) if gateway else self.store.environment(),
                working_dir=working_dir,
            ),
        )
        self.cloud = Cloud(self.pools, self.nodes, layout.instances)
        self.parts = [ChildProcess(spec) for spec in self.control_plane.processes()]
        self.store_process = ChildProcess(self.store.process())
        self.metrics_server = MetricsServer(control_plane=self.control_plane)
        metrics_program = self.metrics_server.process()
        self.metrics_process = ChildProcess(metrics_program) if metrics_program else None
        # What `up` still waits for, in the words that it shows.
        self.waiting_for = list(PARTS)
        self._stop = asyncio.Event()

    def stop(self) -> None:
        """Request the end of `run`."""
        self._stop.set()

    def describe(self) -> dict[str, Any]:
        """Describe the cluster as `spottrain local status` shows it."""
        waiting_for = ["its end"] if self._stop.is_set() else self.waiting_for
        children = [*self.parts, self.store_process, *([self.metrics_process] if self.metrics_process else [])]
        return {
            "name": self.layout.name,
            "runtime": "podman" if self.in_containers else "process",
            "kubernetes": self.kubernetes,
            "ready": not waiting_for,
            "waitingFor": waiting_for,
            "server": self.control_plane.server,
            "kubeconfig": str(self.layout.kubeconfig),
            "store": self.store.environment(),
            "parts": [{"name": p.spec.name, "pid": p.pid, "restarts": p.restarts} for p in children],
            "nodes": [
                instance.model_dump(mode="json", by_alias=True)
                | {
                    "state": instance.state,
                    "pid": self.nodes.pid(instance.node),
                    "capacityType": self.pools[instance.node].capacity_type,
                    "provider": self.pools[instance.node].provider,
                }
                for instance in self.cloud.instances()
            ],
        }

    async def run(self) -> None:
        """Start the cluster, keep it running until it is stopped, and stop it."""
        write_atomically(self.layout.hosts, hosts_file([], []), mode=0o644)
        self.control_plane.write_kubeconfigs()
        async with (
            self._bridge(),
            self.client,
            serve_control_api(self.layout.socket, self.cloud, self.describe, self.stop),
        ):
            # This ends only with an error: two of the tasks run as long as the cluster does.
            work: asyncio.Future[Any] = asyncio.gather(self._start(), self._keep_names(), self._keep_state())
            stopping: asyncio.Future[Any] = asyncio.create_task(self._stop.wait())
            try:
                await asyncio.wait({work, stopping}, return_when=asyncio.FIRST_COMPLETED)
                if work.done():
                    work.result()
            finally:
                work.cancel()
                stopping.cancel()
                await asyncio.gather(work, stopping, return_exceptions=True)
                await self._end()

    @contextlib.asynccontextmanager
    async def _bridge(self) -> AsyncIterator[None]:
        """Keep the bridge of a cluster that runs containers.

        Nothing of theirs is left afterwards.
        """
        if not self.in_containers:
            yield
            return
        number = self.network.number
        ports = [self.control_plane.ports["apiserver"], self.store.ports["store-s3"]]
        async with contextlib.AsyncExitStack() as stack:
            try:
                remove_dead_clusters()
                create_bridge(number)
                stack.callback(remove_cluster, number)
                await stack.enter_async_context(serve_gateway(number, self.name_server, ports))
            except OSError as error:
                raise LocalClusterError(f"The network of the cluster's pods cannot be set up: {error}") from error
            yield

    async def _start(self) -> None:
        started = datetime.now(UTC)
        etcd, apiserver, *controllers = self.parts
        etcd.start()
        apiserver.start()
        self.store_process.start()
        store = asyncio.create_task(self.store.wait_until_ready())
        await wait_until_served(self.client)
        for part in controllers:
            part.start()
        await self.metrics_server.withdraw(self.client)
        await self.nodes.forget_strangers()
        self.cloud.start()
        await wait_until_ready(self.client)
        self.waiting_for.remove("control plane")
        await store
        self.waiting_for.remove("object store")
        await self._wait_for_nodes(started)
        self.waiting_for.remove("nodes")
        logger.info("ready")
        if self.metrics_process:
            self.metrics_process.start()
            await self.metrics_server.announce(self.client)

    async def _wait_for_nodes(self, started: datetime) -> None:
        """Wait until every node that is not gone is Ready.

        Only reports since `started` count.
        """
        while True:
            expected = {instance.node for instance in self.cloud.instances() if not instance.gone}
            with contextlib.suppress(ApiError, *UNREACHABLE):
                nodes = (await self.client.get("/api/v1/nodes")).get("items") or []
                leases = (await self.client.get(NODE_LEASES)).get("items") or []
                fresh = {lease["metadata"]["name"] for lease in leases if _renewed_at(lease) > started}
                if expected <= fresh & {node["metadata"]["name"] for node in nodes if _is_ready(node)}:
                    return
            await asyncio.sleep(NODES_POLL_SECONDS)

    async def _keep_state(self) -> None:
        """Stop the cluster if its state folder is removed.

        Without the folder, nobody could reach the cluster any more.
        """
        socket = self.layout.socket.stat().st_ino
        while True:
            await asyncio.sleep(STATE_POLL_SECONDS)
            if not self.layout.socket.exists() or self.layout.socket.stat().st_ino != socket:
                raise LocalClusterError(f"The state in {self.layout.root} was removed: the cluster stops.")

    async def _keep_names(self) -> None:
        """Keep the hosts file up to date with Services and pods."""
        objects: dict[str, dict[str, Any]] = {"services": {}, "pods": {}}
        await wait_until_served(self.client)

        async def follow(kind: str) -> None:
            known = objects[kind]
            async for event in list_and_watch(self.client, f"/api/v1/{kind}"):
                if event["type"] == "SYNC":
                    known.clear()
                    known.update({item["metadata"]["uid"]: item for item in event["items"]})
                elif event["type"] == "DELETED":
                    known.pop(event["object"]["metadata"]["uid"], None)
                else:
                    known[event["object"]["metadata"]["uid"]] = event["object"]
                self._write_hosts(hosts_file(objects["services"].values(), objects["pods"].values()))

        await asyncio.gather(follow("services"), follow("pods"))

    def _write_hosts(self, text: str) -> None:
        self.name_server.update(text)
        try:
            if self.layout.hosts.read_text() != text:
                write_atomically(self.layout.hosts, text, mode=0o644)
        except OSError as error:
            # A full disk must not end the cluster. The next change of a Service or a pod writes all names.
            logger.error("names of Services stay as they are: %s", error)

    async def _end(self) -> None:
        """Stop the clients of the API server first, then the API server, then its store."""
        await self.cloud.stop()
        await self.nodes.stop_all()
        etcd, apiserver, *controllers = self.parts
        if self.metrics_process:
            controllers.append(self.metrics_process)
        await asyncio.gather(self.store_process.stop(), *(part.stop(kill=True) for part in controllers))
        await apiserver.stop(kill=True)
        await etcd.stop()
        remove_sockets(set(self.store.ports.values()))
        logger.info("stopped")


def _renewed_at(lease: dict[str, Any]) -> datetime:
    return datetime.fromisoformat(lease["spec"]["renewTime"])


def _is_ready(node: dict[str, Any]) -> bool:
    conditions = node.get("status", {}).get("conditions") or []
    return any(item["type"] == "Ready" and item["status"] == "True" for item in conditions)


def _claim(layout: ClusterLayout, spec: ClusterSpec) -> NetworkClaim:
    """Claim the network of the last start if it is free.

    So kubeconfigs stay valid.
    """
    last = json.loads(layout.address.read_text())["network"] if layout.address.exists() else None
    if spec.runtime == "podman":
        claim = claim_network(last, prefix=CONTAINER_PREFIX, usable=is_network_free)
    else:
        claim = claim_network(last)
    write_atomically(layout.address, json.dumps({"network": claim.number}))
    return claim


async def _supervise(layout: ClusterLayout, working_dir: Path) -> None:
    try:
        spec = ClusterSpec.model_validate_json(layout.spec.read_bytes())
        supervisor = Supervisor(layout, spec, _claim(layout, spec), working_dir)
    except ValueError as error:
        raise unreadable_state(layout, error) from error
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, supervisor.stop)
    await supervisor.run()


@click.command()
@click.option("--state", type=click.Path(path_type=Path, exists=True, file_okay=False), required=True)
def main(state: Path) -> None:
    """Run the local cluster whose state is in this folder, until SIGTERM."""
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(message)s")
    logging.getLogger("aiohttp.access").setLevel(logging.WARNING)
    layout = ClusterLayout(root=state.resolve())
    # The folder in which the cluster was started stands for the file system of every image.
    working_dir = Path.cwd()
    # A relative path keeps the socket's name within the limit of 107 bytes.
    os.chdir(layout.root)
    watch_children_by_pidfd()
    with layout.lock.open("a+") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise click.ClickException(f"The cluster {layout.name} is already running.") from None
        lock.truncate(0)
        lock.write(str(os.getpid()))
        lock.flush()
        try:
            asyncio.run(_supervise(layout, working_dir))
        except LocalClusterError as error:
            raise click.ClickException(str(error)) from error


if __name__ == "__main__":
    main()
