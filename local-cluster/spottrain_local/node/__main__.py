"""`python -m spottrain_local.node --config FILE`: one node process."""

import argparse
import asyncio
import logging
import signal
import sys
from pathlib import Path

from .api import ApiClient
from .config import ConfigError, NodeConfig, load_config
from .kubelet import Kubelet
from .process_runtime import ProcessRuntime


async def run_node(config: NodeConfig) -> None:
    """Run a node until SIGTERM or SIGINT."""
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
        await Kubelet(config, client, ProcessRuntime(owns_process=True)).run(stop)


def main() -> int:
    """Parse the command line and run; 2 for a wrong configuration, 1 if an address can't be had."""
    parser = argparse.ArgumentParser(prog="python -m spottrain_local.node", description=__doc__)
    parser.add_argument("--config", type=Path, required=True, help="the node's configuration, a JSON file")
    parser.add_argument("--verbose", action="store_true", help="log more")
    options = parser.parse_args()
    logging.basicConfig(
        level=logging.DEBUG if options.verbose else logging.INFO,
        format="%(asctime)s %(levelname)s %(name)s: %(message)s",
        stream=sys.stderr,
    )
    try:
        config = load_config(options.config)
        asyncio.run(run_node(config))
    except ConfigError as error:
        print(error, file=sys.stderr)
        return 2
    except OSError as error:
        print(f"The node can't run: {error}.", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
