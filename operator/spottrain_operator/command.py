"""The command line of `python -m spottrain_operator`."""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import socket

import click

from spottrain_api import logs
from spottrain_api.contract import (
    CONTROL_PORT,
    ENV_CONTROL_URL,
    ENV_WATCHER_PORT,
    HEALTH_PORT,
    METRICS_PORT,
    WATCHER_PORT,
)
from spottrain_api.v1alpha1 import Network
from spottrain_operator.cluster.client import ClusterError
from spottrain_operator.cluster.lease import LeaseSettings
from spottrain_operator.cluster.placement import Site
from spottrain_operator.options import spot_labels_option
from spottrain_operator.process import LeadershipLostError, OperatorSettings, run_operator

logger = logging.getLogger("spottrain_operator")


@click.command()
@click.option(
    "--host", envvar="SPOTTRAIN_CONTROL_HOST", default="0.0.0.0", help="Address on which the operator listens."
)
@click.option("--port", envvar="SPOTTRAIN_CONTROL_PORT", default=CONTROL_PORT, help="Port of the control API.")
@click.option("--health-port", envvar="SPOTTRAIN_HEALTH_PORT", default=HEALTH_PORT, help="Port of the probes.")
@click.option("--metrics-port", envvar="SPOTTRAIN_METRICS_PORT", default=METRICS_PORT, help="Port of /metrics.")
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
@spot_labels_option
@click.option(
    "--allowed-network",
    "allowed_networks",
    envvar="SPOTTRAIN_ALLOWED_NETWORKS",
    multiple=True,
    type=click.Choice([network.value for network in Network]),
    help="Network that jobs may ask for with podTemplate.network. Its pods run as root. Default: none.",
)
@click.option(
    "--network-policies/--no-network-policies",
    envvar="SPOTTRAIN_NETWORK_POLICIES",
    default=False,
    help="Create a NetworkPolicy for each job, by which only its own pods reach its pods.",
)
def main(
    host: str,
    port: int,
    health_port: int,
    metrics_port: int,
    control_url: str,
    namespace: str,
    identity: str,
    log_level: str,
    watcher_port: int,
    spot_labels: dict[str, str],
    allowed_networks: tuple[str, ...],
    network_policies: bool,
) -> None:
    """Run the spottrain operator until SIGTERM."""
    try:
        logs.configure("spottrain-operator", level=log_level)
    except ValueError as error:
        raise click.UsageError(str(error)) from error
    settings = OperatorSettings(
        control_url=control_url.rstrip("/"),
        lease=LeaseSettings(namespace=namespace, identity=identity),
        host=host,
        port=port,
        health_port=health_port,
        metrics_port=metrics_port,
        site=Site(
            spot_labels=spot_labels,
            watcher_port=watcher_port,
            allowed_networks=frozenset(Network(name) for name in allowed_networks),
            isolates_jobs=network_policies,
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


async def _until_signalled(settings: OperatorSettings) -> None:
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop.set)
    await run_operator(settings, stop)
