"""`python -m spottrain_watcher`: one process on each spot node, on the host network."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import signal
import sys
from collections.abc import Mapping

import aiohttp
from aiohttp import web

from spottrain_api.contract import ENV_HOST_IP, ENV_NODE_NAME, ENV_WATCHER_PORT, WATCHER_PORT
from spottrain_watcher.ec2 import Ec2Source
from spottrain_watcher.kubernetes_api import KubernetesApi, KubernetesError
from spottrain_watcher.kubernetes_signals import KubernetesSource
from spottrain_watcher.node_marker import NodeMarker
from spottrain_watcher.provider import Provider, detect_provider, provider_from_environment
from spottrain_watcher.signal_source import SignalSource
from spottrain_watcher.watcher import Watcher

logger = logging.getLogger(__name__)

RETRY_SECONDS = 1.0


async def _find_provider(api: KubernetesApi, node: str, environ: Mapping[str, str]) -> Provider:
    provider = provider_from_environment(environ)
    while provider is None:
        try:
            provider = detect_provider(await api.get(f"/api/v1/nodes/{node}"))
        except KubernetesError as error:
            logger.warning("the node can't be read yet: %s", error)
            await asyncio.sleep(RETRY_SECONDS)
    return provider


async def _watch(session: aiohttp.ClientSession, environ: Mapping[str, str]) -> None:
    """Watch and serve until cancelled."""
    node = environ[ENV_NODE_NAME]
    api = KubernetesApi.in_cluster(session, environ)
    provider = await _find_provider(api, node, environ)
    logger.info("watching node %s, provider %s", node, provider)
    sources: list[SignalSource] = [KubernetesSource(api, node)]
    if provider is Provider.EC2:
        sources.append(Ec2Source(session, node, environ))
    marker = NodeMarker(api, node)
    watcher = Watcher(sources, marker)
    runner = web.AppRunner(watcher.application(), access_log=None, shutdown_timeout=0.5)
    await runner.setup()
    try:
        await web.TCPSite(runner, environ[ENV_HOST_IP], int(environ.get(ENV_WATCHER_PORT) or WATCHER_PORT)).start()
        await asyncio.gather(watcher.run(), marker.run())
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
    logging.basicConfig(level=logging.INFO, format="%(asctime)s spottrain-watcher %(levelname)s %(message)s")
    for name in (ENV_NODE_NAME, ENV_HOST_IP):
        if not os.environ.get(name):
            print(f"spottrain-watcher: {name} is not set. Set it in the DaemonSet's pod template.", file=sys.stderr)
            return 2
    try:
        asyncio.run(_serve(os.environ))
    except KubernetesError as error:
        print(f"spottrain-watcher: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
