"""The node: registers itself, and runs a worker for each pod that is bound to it."""

import asyncio
import contextlib
import logging
import shutil
import time
from pathlib import Path

from aiohttp import web

from spottrain_local.metadata.server import build_app as build_metadata_app
from spottrain_local.node import log_server
from spottrain_local.node.addresses import AddressPool
from spottrain_local.node.api import ApiClient, JSONObject, list_and_watch
from spottrain_local.node.cluster_objects import ApiObjectSource
from spottrain_local.node.config import NodeConfig
from spottrain_local.node.container_worker import PodContext
from spottrain_local.node.containers import ContainerRuntime, PodSandbox
from spottrain_local.node.downward import PodPlace
from spottrain_local.node.environment import hostname
from spottrain_local.node.events import EventRecorder
from spottrain_local.node.node_status import NodeRegistration, instance_id
from spottrain_local.node.pod_status import TERMINAL_PHASES
from spottrain_local.node.pod_worker import PodWorker
from spottrain_local.node.resource_metrics import resource_metrics
from spottrain_local.node.streams import KubeletSite, StreamServer
from spottrain_local.node.volumes import PodVolumes

logger = logging.getLogger(__name__)

SHUTDOWN_MESSAGE = "Pod was terminated in response to imminent node shutdown."


class Kubelet:
    """One node. `run` ends when `stop` is set, after the pods have been stopped."""

    def __init__(self, config: NodeConfig, client: ApiClient, runtime: ContainerRuntime) -> None:
        self._config = config
        self._client = client
        self._runtime = runtime
        self._source = ApiObjectSource(client)
        self._events = EventRecorder(client, config.name)
        self._registration = NodeRegistration(client, config, runtime.version)
        self._addresses = AddressPool(config.pod_network)
        self._workers: dict[str, PodWorker] = {}
        self._tasks: dict[str, asyncio.Task[None]] = {}

    async def run(self, stop: asyncio.Event) -> None:
        """Serve, register, and run pods until `stop` is set."""
        await self._runtime.open()
        runners: list[KubeletSite | web.AppRunner] = [await self._serve_api(), await self._serve_metadata()]
        background: list[asyncio.Task[None]] = []
        try:
            background.append(asyncio.create_task(self._events.run()))
            registering = asyncio.create_task(self._registration.register())
            stopped = asyncio.create_task(stop.wait())
            await asyncio.wait({registering, stopped}, return_when=asyncio.FIRST_COMPLETED)
            if not stop.is_set():
                background += [
                    asyncio.create_task(self._registration.run()),
                    asyncio.create_task(self._follow_pods()),
                ]
                logger.info("node %s is registered", self._config.name)
                await asyncio.wait({stopped, *background}, return_when=asyncio.FIRST_COMPLETED)
                _raise_first_error(background)
                await self._shut_down()
            registering.cancel()
        finally:
            for task in (*background, *self._tasks.values()):
                task.cancel()
            for runner in runners:
                await runner.cleanup()

    async def _serve_api(self) -> KubeletSite:
        config = self._config
        tls = log_server.server_tls(config.serving_cert_file, config.serving_key_file, config.client_ca_file)
        app = log_server.build_app(self._find, self._pods, self._metrics)
        runner = web.AppRunner(app, access_log=None, shutdown_timeout=0.2)
        site = KubeletSite(runner, StreamServer(self._find, self._runtime, config.streams_program))
        await site.start(self._runtime.listen(config.node_ip, config.kubelet_port), tls)
        return site

    async def _serve_metadata(self) -> web.AppRunner:
        config = self._config
        app = build_metadata_app(
            provider=config.provider,
            instance_id=instance_id(config),
            name=config.name,
            instance_type=config.instance_type,
            zone=config.zone,
            spot=config.capacity_type == "spot",
            interruption_file=config.state_dir / "interruption.json",
        )
        runner = web.AppRunner(app, access_log=None, shutdown_timeout=0.2)
        await runner.setup()
        await web.SockSite(runner, self._runtime.listen(config.metadata_host, config.metadata_port)).start()
        return runner

    # -- pods --------------------------------------------------------------------------------------------

    def _find(self, namespace: str, name: str) -> PodWorker | None:
        # The newest first: an older pod of the same name may still be ending.
        for worker in reversed(self._workers.values()):
            metadata = worker.context.pod["metadata"]
            if (metadata["namespace"], metadata["name"]) == (namespace, name):
                return worker
        return None

    def _pods(self) -> list[JSONObject]:
        return [worker.context.pod for worker in self._workers.values()]

    def _metrics(self) -> str:
        return resource_metrics(list(self._workers.values()), time.time())

    async def _follow_pods(self) -> None:
        selector = f"spec.nodeName={self._config.name}"
        first = True
        async for event in list_and_watch(self._client, "/api/v1/pods", fieldSelector=selector):
            match event["type"]:
                case "SYNC":
                    self._sync(event["items"])
                    if first:
                        await asyncio.to_thread(self._remove_strange_folders, set(self._workers))
                    first = False
                case "DELETED":
                    self._pod_removed(event["object"]["metadata"]["uid"])
                case _:
                    self._pod_seen(event["object"])

    def _sync(self, pods: list[JSONObject]) -> None:
        present = {pod["metadata"]["uid"] for pod in pods}
        for uid in set(self._workers) - present:
            self._pod_removed(uid)
        for pod in pods:
            self._pod_seen(pod)

    def _pod_removed(self, uid: str) -> None:
        if worker := self._workers.get(uid):
            worker.removed()

    def _pod_seen(self, pod: JSONObject) -> None:
        uid = pod["metadata"]["uid"]
        if uid not in self._workers:
            try:
                worker = self._new_worker(pod)
            except ValueError as error:
                logger.error("pod %s has to wait: %s", pod["metadata"]["name"], error)
                return
            self._workers[uid] = worker
            self._tasks[uid] = asyncio.create_task(self._run_pod(uid, worker))
        self._workers[uid].update(pod)

    async def _run_pod(self, uid: str, worker: PodWorker) -> None:
        try:
            await worker.run()
        except Exception:
            # The failure of one pod must not end the node. It is logged, and the pod stays as it is.
            metadata = worker.context.pod["metadata"]
            logger.exception("pod %s/%s: its worker failed", metadata["namespace"], metadata["name"])
        else:
            del self._workers[uid], self._tasks[uid]

    def _address(self, pod: JSONObject) -> str:
        """Return the pod's address: the one that it has, a free one, or the node's.

        Raises:
            ValueError: No address is free.
        """
        status = pod.get("status") or {}
        if pod["spec"].get("hostNetwork"):
            return self._config.node_ip
        if status.get("phase") in TERMINAL_PHASES:
            return str(status.get("podIP") or "")
        return self._addresses.take(status.get("podIP"))

    def _new_worker(self, pod: JSONObject) -> PodWorker:
        config, uid = self._config, pod["metadata"]["uid"]
        address = self._address(pod)
        place = PodPlace(
            node_name=config.name, pod_ip=address, host_ip=config.node_ip, cpu=config.cpu, memory=config.memory
        )
        directory, host_network = self._pod_directory(uid), bool(pod["spec"].get("hostNetwork"))
        sandbox = PodSandbox(
            uid=uid,
            namespace=pod["metadata"]["namespace"],
            hostname=config.name if host_network else hostname(pod),
            ip=address,
            host_network=host_network,
            directory=directory,
        )
        context = PodContext(
            pod=pod,
            config=config,
            place=place,
            sandbox=sandbox,
            directory=directory,
            volumes=PodVolumes(directory / "v", pod, place, self._source, owns_files=config.runtime == "podman"),
            source=self._source,
            runtime=self._runtime,
            events=self._events,
            changed=lambda: None,
        )
        return PodWorker(context, self._client, ended=lambda: self._addresses.give_back(address))

    def _pod_directory(self, uid: str) -> Path:
        # Programs put Unix sockets into temporary folders, and a socket's address must be short.
        return self._config.state_dir / "pods" / uid[:8]

    def _remove_strange_folders(self, known: set[str]) -> None:
        keep = {self._pod_directory(uid).name for uid in known}
        with contextlib.suppress(FileNotFoundError):
            for folder in (self._config.state_dir / "pods").iterdir():
                if folder.name not in keep:
                    shutil.rmtree(folder, ignore_errors=True)

    async def _shut_down(self) -> None:
        """Shut the node down gracefully: every pod ends as Failed.

        Each has its own grace period or, if that is shorter, the node's.
        """
        await self._registration.shut_down()
        workers = list(self._workers.values())
        for worker in workers:
            worker.fail("Terminated", SHUTDOWN_MESSAGE, self._config.shutdown_grace_seconds)
        try:
            async with asyncio.timeout(self._config.shutdown_grace_seconds + 3):
                await asyncio.gather(*(worker.finished() for worker in workers))
        except TimeoutError:
            logger.warning("node %s shuts down before the end of all its pods is on record", self._config.name)


def _raise_first_error(tasks: list[asyncio.Task[None]]) -> None:
    for task in tasks:
        if task.done() and not task.cancelled() and (error := task.exception()):
            raise error
