"""The command line of `python -m spottrain_operator`."""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import socket

import click

from spottrain_api import logs
from spottrain_api.contract import CONTROL_PORT, ENV_CONTROL_URL, ENV_WATCHER_PORT, WATCHER_PORT
from spottrain_api.v1alpha1 import Network
from spottrain_operator.cluster.client import ClusterError
from spottrain_operator.cluster.lease import LeaseSettings
from spottrain_operator.cluster.placement import Site
from spottrain_operator.core.scope import Scope
from spottrain_operator.options import (
    pod_labels_option,
    spot_labels_option,
    watch_labels_option,
    watch_namespaces_option,
)
from spottrain_operator.process import LeadershipLostError, OperatorSettings, run_operator

logger = logging.getLogger("spottrain_operator")


@click.command()
@click.option("--host", envvar="SPOTTRAIN_CONTROL_HOST", default="0.0.0.0", help="Address of the control API.")
@click.option("--port", envvar="SPOTTRAIN_CONTROL_PORT", default=CONTROL_PORT, help="Port of the control API.")
@click.option(
    "--control-url",
    envvar=ENV_CONTROL_URL,
    required=True,
    help="Where the agents reach the control API, such as http://spottrain-operator.spottrain-system.svc:8080.",
)
@click.option("--namespace", envvar="POD_NAMESPACE", default="default", help="Namespace of the lease.")
@click.option("--identity", envvar="POD_NAME", default=socket.gethostname, help="Who holds the lease.")
@click.option("--log-level", envvar="SPOTTRAIN_LOG_LEVEL", default="INFO")
@click.option("--watcher-port", envvar=ENV_WATCHER_PORT, default=WATCHER_PORT, help="Port of the watcher on nodes.")
@pod_labels_option
@watch_namespaces_option
@watch_labels_option
@spot_labels_option
@click.option(
    "--allowed-network",
    "allowed_networks",
    envvar="SPOTTRAIN_ALLOWED_NETWORKS",
    multiple=True,
    type=click.Choice([network.value for network in Network]),
    help="Network that jobs may ask for with podTemplate.network. Its pods run as root. Default: none.",
)
def main(
    host: str,
    port: int,
    control_url: str,
    namespace: str,
    identity: str,
    log_level: str,
    watcher_port: int,
    pod_labels: dict[str, str],
    watch_namespaces: tuple[str, ...],
    watch_labels: dict[str, str],
    spot_labels: dict[str, str],
    allowed_networks: tuple[str, ...],
) -> None:
    """Run the spottrain operator until SIGTERM."""
    try:
        logs.configure("spottrain-operator", level=log_level)
    except ValueError as error:
        raise click.UsageError(str(error)) from error
    for handler in logging.getLogger().handlers:
        handler.addFilter(retry_is_no_error)
    # kopf logs every event that it passes on; only decisions matter here.
    logging.getLogger("kopf").setLevel(logging.WARNING)
    settings = OperatorSettings(
        control_url=control_url.rstrip("/"),
        lease=LeaseSettings(
            namespace=namespace,
            identity=identity,
            scope=Scope(names=frozenset(watch_namespaces), labels=watch_labels),
        ),
        pod_labels=pod_labels,
        host=host,
        port=port,
        site=Site(
            spot_labels=spot_labels,
            watcher_port=watcher_port,
            allowed_networks=frozenset(Network(name) for name in allowed_networks),
            log_format=logs.log_format(),
        ),
    )
    try:
        asyncio.run(_until_signalled(settings))
    except ClusterError as error:
        raise click.ClickException(str(error)) from error
    except LeadershipLostError:
        # Nothing that still runs in threads or sockets may outlive the lease.
        logger.error("the lease is lost; another operator may lead now, so this one ends")
        os._exit(1)


def retry_is_no_error(record: logging.LogRecord) -> bool:
    """Log a request that kopf is going to repeat as a warning.

    The API server may just be starting. kopf logs it as an error. If kopf gives up, it says so in a line of its own,
    which stays an error.
    """
    if record.name.startswith("kopf") and record.levelno == logging.ERROR and "; will retry: " in record.getMessage():
        record.levelno, record.levelname = logging.WARNING, "WARNING"
    return True


async def _until_signalled(settings: OperatorSettings) -> None:
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop.set)
    await run_operator(settings, stop)
