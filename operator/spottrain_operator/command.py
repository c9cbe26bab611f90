"""The command line of `python -m spottrain_operator`."""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import socket
from dataclasses import replace
from pathlib import Path
from urllib.parse import urlsplit

import click

from spottrain_api.contract.names import (
    CONTROL_PORT,
    ENV_CONTROL_URL,
    ENV_WATCHER_PORT,
    HEALTH_PORT,
    METRICS_PORT,
    WATCHER_PORT,
)
from spottrain_api.v1alpha1.pod_template import Network
from spottrain_operator.control_api.certificate_keeper import CertificateSource
from spottrain_operator.core.timing import DEFAULT_TIMING, Timing
from spottrain_operator.kube.errors import ClusterError
from spottrain_operator.kube.lease import LeaseSettings
from spottrain_operator.kube.limits import DEFAULT_LIMITS, ClientLimits
from spottrain_operator.kube.scope import Scope
from spottrain_operator.objects.placement import Site
from spottrain_operator.options import (
    pod_labels_option,
    spot_labels_option,
    timing_option,
    watch_labels_option,
    watch_namespaces_option,
)
from spottrain_operator.process import LeadershipLostError, OperatorSettings, run_operator
from spottrain_runtime import logs
from spottrain_runtime.processes import open_many_files
from spottrain_runtime.wording import one_line

logger = logging.getLogger("spottrain_operator")


def _https(_context: click.Context, option: click.Parameter, text: str) -> str:
    if urlsplit(text).scheme != "https" or not urlsplit(text).hostname:
        raise click.BadParameter(
            f"{one_line(text)!r} is not the address of a server with TLS. Write it as https://host:port.",
            param=option,
        )
    return text.rstrip("/")


@click.command()
@click.option(
    "--host", envvar="SPOTTRAIN_CONTROL_HOST", default="0.0.0.0", help="Address on which the operator listens."
)
@click.option("--port", envvar="SPOTTRAIN_CONTROL_PORT", default=CONTROL_PORT, help="Port of the control API.")
@click.option(
    "--certificate-from",
    envvar="SPOTTRAIN_CERTIFICATE_FROM",
    type=click.Choice([each.value for each in CertificateSource]),
    default=CertificateSource.OPERATOR.value,
    help="Who makes the control API's certificate: the operator, or whoever writes its Secret.",
)
@click.option(
    "--metrics-token-file",
    envvar="SPOTTRAIN_METRICS_TOKEN_FILE",
    type=click.Path(path_type=Path),
    help="File with the token that /metrics asks for, over TLS. Default: none is needed.",
)
@click.option("--health-port", envvar="SPOTTRAIN_HEALTH_PORT", default=HEALTH_PORT, help="Port of the probes.")
@click.option("--metrics-port", envvar="SPOTTRAIN_METRICS_PORT", default=METRICS_PORT, help="Port of /metrics.")
@click.option(
    "--control-url",
    envvar=ENV_CONTROL_URL,
    required=True,
    callback=_https,
    help="Where the agents reach the control API, such as https://spottrain-operator.spottrain-system.svc:8443.",
)
@click.option("--namespace", envvar="POD_NAMESPACE", default="default", help="Namespace of the lease.")
@click.option("--identity", envvar="POD_NAME", default=socket.gethostname, help="Who holds the lease.")
@click.option("--log-level", envvar="SPOTTRAIN_LOG_LEVEL", default="INFO")
@click.option("--watcher-port", envvar=ENV_WATCHER_PORT, default=WATCHER_PORT, help="Port of the watcher on nodes.")
@pod_labels_option
@watch_namespaces_option
@watch_labels_option
@click.option(
    "--client-qps",
    envvar="SPOTTRAIN_CLIENT_QPS",
    type=click.FloatRange(min=1),
    default=DEFAULT_LIMITS.qps,
    help="Requests a second to the API server, on average.",
)
@click.option(
    "--client-burst",
    envvar="SPOTTRAIN_CLIENT_BURST",
    type=click.IntRange(min=1),
    default=DEFAULT_LIMITS.burst,
    help="Requests to the API server at once, after a pause.",
)
@click.option(
    "--progress-seconds",
    envvar="SPOTTRAIN_PROGRESS_SECONDS",
    type=click.FloatRange(min=1, max=120),  # the alert SpottrainJobStalled fires after 180 s without news
    default=DEFAULT_TIMING.record_interval,
    help="Seconds between two records of a job's progress in its status, while nothing else changes.",
)
@timing_option
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
@click.option(
    "--pod-groups/--no-pod-groups",
    envvar="SPOTTRAIN_POD_GROUPS",
    default=False,
    help="Create a PodGroup for each job, by which it gets the nodes of nodes.min at once, or none.",
)
@click.option(
    "--kueue/--no-kueue",
    envvar="SPOTTRAIN_KUEUE",
    default=False,
    help="Let jobs with the label kueue.x-k8s.io/queue-name wait in queues of Kueue.",
)
@click.option(
    "--karpenter/--no-karpenter",
    envvar="SPOTTRAIN_KARPENTER",
    default=False,
    help="Make NodePools of Karpenter for the pools of jobs that name a node class.",
)
@click.option(
    "--namespaces-assign-ids/--no-namespaces-assign-ids",
    envvar="SPOTTRAIN_NAMESPACES_ASSIGN_IDS",
    default=False,
    help="Leave the user and group ids of pods to the cluster, as OpenShift wants it.",
)
def main(
    host: str,
    port: int,
    certificate_from: str,
    metrics_token_file: Path | None,
    health_port: int,
    metrics_port: int,
    control_url: str,
    namespace: str,
    identity: str,
    log_level: str,
    watcher_port: int,
    pod_labels: dict[str, str],
    watch_namespaces: tuple[str, ...],
    watch_labels: dict[str, str],
    client_qps: float,
    client_burst: int,
    progress_seconds: float,
    timing: Timing,
    spot_labels: dict[str, str],
    allowed_networks: tuple[str, ...],
    network_policies: bool,
    pod_groups: bool,
    kueue: bool,
    karpenter: bool,
    namespaces_assign_ids: bool,
) -> None:
    """Run the spottrain operator until SIGTERM."""
    if watch_namespaces and watch_labels:
        raise click.UsageError(
            "--watch-namespace and --watch-labels are both given. Give the names of namespaces, or their labels."
        )
    open_many_files()
    try:
        logs.configure("spottrain-operator", level=log_level)
    except ValueError as error:
        raise click.UsageError(str(error)) from error
    for handler in logging.getLogger().handlers:
        handler.addFilter(retry_is_no_error)
    # kopf logs every event that it passes on, and that its thread gets no signals; only decisions matter here.
    logging.getLogger("kopf").setLevel(logging.WARNING)
    logging.getLogger("kopf._core.reactor.running").setLevel(logging.ERROR)
    if timing != DEFAULT_TIMING:
        logger.warning("the timings are not the defaults: %s", timing)
    settings = OperatorSettings(
        control_url=control_url,
        lease=LeaseSettings(
            namespace=namespace,
            identity=identity,
            scope=Scope(names=frozenset(watch_namespaces), labels=watch_labels),
        ),
        pod_labels=pod_labels,
        host=host,
        port=port,
        certificate=CertificateSource(certificate_from),
        metrics_token_file=metrics_token_file,
        limits=ClientLimits(qps=client_qps, burst=client_burst),
        timing=replace(timing, record_interval=progress_seconds),
        health_port=health_port,
        metrics_port=metrics_port,
        site=Site(
            spot_labels=spot_labels,
            watcher_port=watcher_port,
            allowed_networks=frozenset(Network(name) for name in allowed_networks),
            isolates_jobs=network_policies,
            groups_pods=pod_groups,
            uses_kueue=kueue,
            uses_karpenter=karpenter,
            assigns_ids=namespaces_assign_ids,
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
