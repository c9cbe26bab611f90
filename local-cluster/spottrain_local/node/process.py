"""A node as a process: reads its configuration and runs until a signal ends it."""

import asyncio
import logging
import signal
import sys
from pathlib import Path

from spottrain_local.node.api import ApiClient
from spottrain_local.node.config import ConfigError, NodeConfig, load_config
from spottrain_local.node.containers import ContainerRuntime
from spottrain_local.node.kubelet import Kubelet
from spottrain_local.node.podman_runtime import NodeIdentity, PodmanRuntime
from spottrain_local.node.process_environment import surroundings
from spottrain_local.node.process_runtime import ProcessRuntime
from spottrain_local.node.shimmed_processes import ShimmedProcesses


def main(config_file: Path, *, verbose: bool = False) -> int:
    """Run the node of this configuration.

    Returns 2 if that is invalid, 1 if an address is not available.
    """
    logging.basicConfig(
        level=logging.DEBUG if verbose else logging.INFO,
        format="%(asctime)s %(levelname)s %(name)s: %(message)s",
        stream=sys.stderr,
        force=True,
    )
    try:
        config = load_config(config_file)
        asyncio.run(_run(config))
    except ConfigError as error:
        print(error, file=sys.stderr)
        return 2
    except OSError as error:
        print(f"The node cannot run: {error}.", file=sys.stderr)
        return 1
    return 0


async def _run(config: NodeConfig) -> None:
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop.set)
    client = ApiClient(
        config.apiserver,
        ca_file=config.ca_file,
        cert_file=config.client_cert_file,
        key_file=config.client_key_file,
    )
    async with client:
        await Kubelet(config, client, _runtime(config)).run(stop)


def _runtime(config: NodeConfig) -> ContainerRuntime:
    if config.runtime == "process":
        return ProcessRuntime(ShimmedProcesses(owns_process=True), surroundings(config))
    return PodmanRuntime(
        NodeIdentity(name=config.name, ip=config.node_ip, network=config.network, gateway=config.gateway)
    )
