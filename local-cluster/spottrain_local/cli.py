"""`spottrain local`: start, stop and use local clusters, and preempt their nodes."""

import functools
import re
import shlex
import time
from collections.abc import Callable, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, ParamSpec, TypeVar
from urllib.parse import urlsplit
from urllib.request import getproxies, proxy_bypass

import click
from rich.console import Console
from rich.table import Table

from spottrain_local.binaries import CONTROL_PLANE, HELM, METRICS, STREAMS, find_binaries, obtain_binaries
from spottrain_local.cluster import DEFAULT_NAME, Cluster, Status, list_clusters, open_cluster
from spottrain_local.go_module import DEFAULT_KUBERNETES, RELEASE_MODULES, KubernetesRelease
from spottrain_local.install import chart_folder, check_operator_image, install_operator
from spottrain_local.layout import LocalClusterError, clusters_root
from spottrain_local.spec import Runtime, load_spec
from spottrain_runtime.wording import counted

P = ParamSpec("P")
R = TypeVar("R")

CLUSTER_NAME = re.compile(r"^[a-z0-9]([a-z0-9-]{0,30}[a-z0-9])?$")
DURATION = re.compile(r"^(\d+(?:\.\d+)?)(ms|s|m|h)?$")
UNIT_SECONDS = {"ms": 0.001, "s": 1.0, "m": 60.0, "h": 3600.0, None: 1.0}
STATE_STYLES = {"running": "green", "gone": "red", "rebalance": "cyan"}


class Duration(click.ParamType[float]):
    """A duration in seconds, in Kubernetes' form: 30s, 2m, 1.5h.

    A number without a unit is in seconds.
    """

    name = "duration"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> float:
        if isinstance(value, float):
            return value
        match = DURATION.match(str(value))
        if not match:
            self.fail(f"{value!r} is not a duration. Write it like 30s or 2m.", param, ctx)
        return float(match.group(1)) * UNIT_SECONDS[match.group(2)]


class ClusterName(click.ParamType[Cluster]):
    """A cluster, by its name."""

    name = "name"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Cluster:
        if isinstance(value, Cluster):
            return value
        if not CLUSTER_NAME.match(value):
            self.fail(f"{value!r} is not a valid name of a cluster. Use at most 32 of a-z, 0-9 and '-'.", param, ctx)
        try:
            return open_cluster(value)
        except LocalClusterError as error:
            raise click.ClickException(str(error)) from error


def with_sentences(function: Callable[P, R]) -> Callable[P, R]:
    """Show a LocalClusterError as a sentence, without a traceback."""

    @functools.wraps(function)
    def wrapped(*args: P.args, **kwargs: P.kwargs) -> R:
        try:
            return function(*args, **kwargs)
        except LocalClusterError as error:
            raise click.ClickException(str(error)) from error
        except PermissionError as error:
            what = f"{error.filename} belongs" if error.filename else "The cluster may belong"
            raise click.ClickException(f"{what} to another user. Ask as that user.") from error

    return wrapped


_name = click.option(
    "--name",
    "cluster",
    type=ClusterName(),
    default=DEFAULT_NAME,
    show_default=True,
    help="Name of the local cluster. Several can run side by side.",
)
_nodes = click.argument("nodes", nargs=-1, required=True, metavar="NODE...")


@click.group()
def local() -> None:
    """Run a real Kubernetes control plane on this machine.

    The nodes are processes.
    """


@local.command()
@_name
@click.option(
    "--nodes",
    "nodes_file",
    type=click.Path(path_type=Path, dir_okay=False),
    help="YAML file with the node pools. The reference describes its fields. Default: 1 system node, 2 on-demand and "
    "4 spot EKS nodes of 8 GPUs, or the nodes of the last time.",
)
@click.option(
    "--runtime",
    type=click.Choice(["process", "podman"]),
    help="Run pods as processes of this machine, or in containers with podman, which needs root. Default: process, "
    "or that of the last time.",
)
@click.option(
    "--kubernetes",
    type=click.Choice(list(RELEASE_MODULES)),
    help=f"Release of Kubernetes. Default: {DEFAULT_KUBERNETES}, or that of the last time. 1.37 has gang scheduling.",
)
@click.option("--no-operator", is_flag=True, help="Do not install spottrain's CRD and operator.")
@click.option(
    "--no-exec",
    is_flag=True,
    help="Do not build what `kubectl exec`, `attach`, `cp`, `port-forward` and `top` need. They work only if it is "
    "in the cache.",
)
@with_sentences
def up(
    cluster: Cluster,
    nodes_file: Path | None,
    runtime: Runtime | None,
    kubernetes: KubernetesRelease | None,
    no_operator: bool,
    no_exec: bool,
) -> None:
    """Start a local cluster and install spottrain into it.

    A cluster that ran before continues. Its nodes that were taken away stay away: `spottrain local restore` brings
    them back.

    The environment variable SPOTTRAIN_LOCAL_HOME names the folder for the state of clusters. Default:
    ~/.local/state/spottrain.
    """
    console = Console(stderr=True)
    with_operator = not no_operator and (chart_folder() / "Chart.yaml").exists()
    nodes = load_spec(nodes_file) if nodes_file else None
    spec = cluster.with_choices(nodes, runtime=runtime, kubernetes=kubernetes)
    _obtain_binaries(console, cluster.release_of(spec), with_operator=with_operator, with_exec=not no_exec)
    started = time.monotonic()
    with console.status("Starting the cluster …") as display:

        def show(waiting_for: Sequence[str]) -> None:
            display.update(f"Starting the cluster: waiting for {', '.join(waiting_for)} …")

        def install() -> None:
            if with_operator:
                display.update("Installing spottrain: CRD and operator …")
                install_operator(cluster)

        status = cluster.up(spec, show, install, check_operator_image if with_operator else None)
    seconds = time.monotonic() - started
    console.print(f"The cluster {status['name']} is ready after {seconds:.1f} s: {_summary(status)}.")
    console.print("Point kubectl at it with:")
    click.echo(f"export KUBECONFIG={shlex.quote(str(cluster.kubeconfig))}")


@local.command()
@_name
@click.option("--delete", is_flag=True, help="Also delete its state: objects, checkpoints, logs.")
@with_sentences
def down(cluster: Cluster, delete: bool) -> None:
    """Stop a local cluster. Its objects and checkpoints return with the next `up`."""
    name = cluster.layout.name
    was_running = cluster.down(delete=delete)
    click.echo(
        f"The cluster {name} {'is stopped' if was_running else 'was not running'}.{' Its state is deleted.' * delete}"
    )


@local.command()
@_name
@with_sentences
def status(cluster: Cluster) -> None:
    """Show a cluster's processes and nodes."""
    now = cluster.status()
    if now is None:
        others = [name for name in list_clusters(clusters_root()) if open_cluster(name).status()]
        click.echo(f"The cluster {cluster.layout.name} is not running.")
        if others:
            click.echo(f"Running: {', '.join(others)} (see `--name`).")
        raise SystemExit(1)
    ready = "ready" if now["ready"] else f"waiting for {', '.join(now['waitingFor'])}"
    click.echo(f"{now['name']}: {ready}; {now['server']}; KUBECONFIG={now['kubeconfig']}")
    console = Console()
    console.print(_parts_table(now))
    console.print(_nodes_table(now))


@local.command()
@_name
@with_sentences
def kubeconfig(cluster: Cluster) -> None:
    """Print the path of the kubeconfig.

    For example: `export KUBECONFIG=$(spottrain local kubeconfig)`.
    """
    if not cluster.kubeconfig.exists():
        cluster.running_status()
    click.echo(cluster.kubeconfig)


@local.command()
@_name
@with_sentences
def store(cluster: Cluster) -> None:
    """Print the object store's endpoint and credentials.

    They are environment variables for a shell. If it names an HTTP proxy, no_proxy excepts the store from it.
    """
    environment = cluster.running_status()["store"]
    for key, value in environment.items():
        click.echo(f"export {key}={shlex.quote(value)}")
    # Clients of S3 ask a proxy for loopback addresses, too. Of the two names, Python prefers the one in lower case.
    host = urlsplit(environment["AWS_ENDPOINT_URL_S3"]).hostname or ""
    if "http" in getproxies() and not proxy_bypass(host):
        without = ",".join(filter(None, (host, getproxies().get("no"))))
        click.echo(f"export no_proxy={shlex.quote(without)}")


@local.command()
@_name
@_nodes
@click.option("--notice", type=Duration(), default="120s", show_default=True, help="Time until the nodes are gone.")
@click.option(
    "--kind",
    type=click.Choice(["preempt", "rebalance", "maintenance"]),
    default="preempt",
    show_default=True,
    help="What is announced. A rebalance recommendation takes no node away.",
)
@click.option(
    "--action",
    type=click.Choice(["terminate", "stop", "hibernate"]),
    default="terminate",
    show_default=True,
    help="What EC2's metadata server says will happen to the instance.",
)
@with_sentences
def preempt(cluster: Cluster, nodes: tuple[str, ...], notice: float, kind: str, action: str) -> None:
    """Announce a preemption on the nodes' metadata servers.

    At the deadline, the cloud takes the nodes.
    """
    after = cluster.preempt(nodes, notice_seconds=notice, kind=kind, action=action)
    for node in _these(after, nodes):
        deadline = datetime.fromisoformat(node["interruption"]["deadline"]).astimezone(UTC)
        end = "may be taken back" if kind == "rebalance" else f"goes at {deadline:%H:%M:%S} UTC"
        click.echo(f"{node['node']}: {kind} announced; it {end}.")


@local.command()
@_name
@_nodes
@with_sentences
def cancel(cluster: Cluster, nodes: tuple[str, ...]) -> None:
    """Take a notice back: the nodes stay."""
    cluster.cancel(nodes)
    click.echo(f"Cancelled the notices of {', '.join(nodes)}.")


@local.command()
@_name
@_nodes
@with_sentences
def kill(cluster: Cluster, nodes: tuple[str, ...]) -> None:
    """End nodes now, without a notice, with everything that runs on them."""
    cluster.kill(nodes)
    click.echo(f"Killed: {', '.join(nodes)}.")


@local.command()
@_name
@_nodes
@with_sentences
def restore(cluster: Cluster, nodes: tuple[str, ...]) -> None:
    """Start fresh instances for nodes that are gone.

    Nodes that are not gone are named in the error; the others are restored all the same.
    """
    cluster.restore(nodes)
    click.echo(f"Started fresh instances: {', '.join(nodes)}.")


def _obtain_binaries(console: Console, release: KubernetesRelease, *, with_operator: bool, with_exec: bool) -> None:
    """Obtain what the cluster needs.

    What only some commands of kubectl need may be missing.
    """
    needed = (*CONTROL_PLANE, *([HELM] if with_operator else []))
    try:
        obtain_binaries((*needed, *((STREAMS, METRICS) if with_exec else ())), console, release=release)
    except LocalClusterError as error:
        find = find_binaries(release=release).find
        if not all(map(find, needed)):
            raise
        commands = "`kubectl exec`, `attach`, `cp`, `port-forward` and `top`"
        console.print(f"{commands} will not work. {error}", soft_wrap=True, markup=False)


def _summary(status: Status) -> str:
    counts: dict[str, int] = {}
    for node in status["nodes"]:
        if not node["gone"]:
            counts[node["capacityType"]] = counts.get(node["capacityType"], 0) + 1
    return " and ".join(counted(count, f"{kind} node") for kind, count in counts.items()) or "no nodes"


def _these(status: Status, names: Sequence[str]) -> list[dict[str, Any]]:
    return [node for node in status["nodes"] if node["node"] in names]


def _parts_table(status: Status) -> Table:
    table = Table("process", "pid", "restarts", box=None, header_style="bold")
    for part in status["parts"]:
        table.add_row(part["name"], str(part["pid"] or "starting"), str(part["restarts"]))
    return table


def _nodes_table(status: Status) -> Table:
    table = Table("node", "provider", "capacity", "state", "goes at", "pid", box=None, header_style="bold")
    for node in status["nodes"]:
        interruption, style = node["interruption"], STATE_STYLES.get(node["state"], "yellow")
        pending = interruption and node["state"] not in ("gone", "rebalance")
        deadline = datetime.fromisoformat(interruption["deadline"]).strftime("%H:%M:%S UTC") if pending else ""
        state = f"[{style}]{node['state']}[/{style}]"
        table.add_row(node["node"], node["provider"], node["capacityType"], state, deadline, str(node["pid"] or ""))
    return table


if __name__ == "__main__":
    local()
