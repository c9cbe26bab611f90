"""`python -m spottrain_watcher`: run the watcher.

One process runs on each spot node, on the host network.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import secrets
import signal
import sys
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import aiohttp
from aiohttp import web

from spottrain_api.contract.names import (
    ENV_HOST_IP,
    ENV_NODE_NAME,
    ENV_WATCHER_PORT,
    LABEL_MANAGED_BY,
    MANAGED_BY,
    WATCHER_PORT,
)
from spottrain_api.contract.notices import watcher_mark
from spottrain_runtime import logs
from spottrain_runtime.http_server import bounded_runner
from spottrain_watcher.azure import ENV_ACKNOWLEDGE, AzureSource
from spottrain_watcher.ec2 import Ec2Source
from spottrain_watcher.gce import GceSource
from spottrain_watcher.kubernetes_api import KubernetesApi, KubernetesError
from spottrain_watcher.kubernetes_signals import KubernetesSource, labels_of
from spottrain_watcher.node_marker import NodeMarker
from spottrain_watcher.provider import Provider, UnknownProvider, detect_provider, provider_from_environment
from spottrain_watcher.signal_source import SignalSource
from spottrain_watcher.watcher import Watcher

logger = logging.getLogger(__name__)

RETRY_SECONDS = 1.0


class AddressError(Exception):
    """The watcher can't listen at its address."""


async def _read_node(api: KubernetesApi, node: str) -> dict[str, Any]:
    while True:
        try:
            return await api.get(f"/api/v1/nodes/{node}")
        except KubernetesError as error:
            logger.warning("the node can't be read yet: %s", error)
            await asyncio.sleep(RETRY_SECONDS)


async def _is_vacated(api: KubernetesApi, node: str) -> bool:
    """Whether no trainer pod is left on the node."""
    labels, fields = f"{LABEL_MANAGED_BY}={MANAGED_BY}", f"spec.nodeName={node}"
    try:
        pods = await api.get("/api/v1/pods", labelSelector=labels, fieldSelector=fields)
    except KubernetesError as error:
        logger.debug("%s", error)
        return False
    return all(pod["status"].get("phase") in ("Succeeded", "Failed") for pod in pods["items"])


def _cloud_source(
    session: aiohttp.ClientSession,
    api: KubernetesApi,
    kubernetes: KubernetesSource,
    marker: NodeMarker,
    named: Provider | None,
    environ: Mapping[str, str],
) -> SignalSource | None:
    """The source of the cloud that is named, or that the Node object shows; None if it shows none."""
    node = environ[ENV_NODE_NAME]
    provider = detect_provider(kubernetes.node) if named is None else named
    if provider is Provider.OTHER:
        return None
    logger.info("watching node %s, provider %s", node, provider)
    match provider:
        case Provider.EC2:
            return Ec2Source(session, node, environ)
        case Provider.GCE:
            return GceSource(
                session,
                node,
                environ,
                labels=lambda: labels_of(kubernetes.node),
                on_shutdown_grace=marker.label_grace,
            )
        case Provider.AZURE:
            acknowledges = environ.get(ENV_ACKNOWLEDGE, "").lower() == "true"
            return AzureSource(
                session, node, environ, is_vacated=partial(_is_vacated, api, node) if acknowledges else None
            )


async def _late_cloud(cloud_source: Callable[[], SignalSource | None]) -> SignalSource:
    """The source of the cloud once the Node shows it.

    The cloud's controller may come after the watcher.
    """
    while True:
        source = cloud_source()
        if source is not None:
            return source
        await asyncio.sleep(RETRY_SECONDS)


async def _listen(runner: web.AppRunner, host: str, port: int) -> None:
    try:
        await web.TCPSite(runner, host, port).start()
    except OSError as error:
        why = os.strerror(error.errno) if error.errno is not None else error
        raise AddressError(
            f"can't listen at port {port} of {host}: {why}. "
            "Stop what uses the port, or choose another one with the chart's value watcher.port."
        ) from error


async def _watch(session: aiohttp.ClientSession, environ: Mapping[str, str]) -> None:
    """Watch and serve until cancelled."""
    node, named = environ[ENV_NODE_NAME], provider_from_environment(environ)
    api = KubernetesApi.in_cluster(session, environ)
    kubernetes = KubernetesSource(api, await _read_node(api, node))
    sources: list[SignalSource] = [kubernetes]
    proof = secrets.token_hex()
    marker = NodeMarker(api, node, watcher_mark(proof))
    cloud_source = partial(_cloud_source, session, api, kubernetes, marker, named, environ)
    cloud = cloud_source()
    if cloud is not None:
        sources.append(cloud)
    watcher = Watcher(sources, marker, proof)
    runner = bounded_runner(watcher.application(), shutdown_timeout=0.5)
    await runner.setup()
    try:
        await _listen(runner, environ[ENV_HOST_IP], int(environ.get(ENV_WATCHER_PORT) or WATCHER_PORT))
        late = _late_cloud(cloud_source) if cloud is None and named is None else None
        await asyncio.gather(watcher.run(late), marker.run())
    finally:
        await runner.cleanup()


async def _serve(environ: Mapping[str, str]) -> None:
    """Watch until SIGTERM."""
    async with aiohttp.ClientSession() as session:
        watching = asyncio.create_task(_watch(session, environ))
        for number in (signal.SIGTERM, signal.SIGINT):
            asyncio.get_running_loop().add_signal_handler(number, watching.cancel)
        with contextlib.suppress(asyncio.CancelledError):
            await watching


def main() -> int:
    try:
        logs.configure("spottrain-watcher")
    except ValueError as error:
        print(f"spottrain-watcher: {error}", file=sys.stderr)
        return 2
    logs.remember(node=os.environ.get(ENV_NODE_NAME))
    for name in (ENV_NODE_NAME, ENV_HOST_IP):
        if not os.environ.get(name):
            print(f"spottrain-watcher: {name} is not set. Set it in the DaemonSet's pod template.", file=sys.stderr)
            return 2
    try:
        asyncio.run(_serve(os.environ))
    except (KubernetesError, UnknownProvider, AddressError) as error:
        print(f"spottrain-watcher: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
