"""The commands `podman` and `ip`: whether they work here, and what they left."""

import json
import os
import re
import shutil
import subprocess
from collections.abc import Sequence
from ipaddress import IPv4Network
from pathlib import Path

from spottrain_local.address import claim_number
from spottrain_local.layout import LocalClusterError

NAMESPACES, DEVICES = Path("/run/netns"), Path("/sys/class/net")
NETWORK_LABEL, NODE_LABEL = "dev.spottrain.network", "dev.spottrain.node"
_BRIDGE = re.compile(r"spt(\d+)")
HOW_TO = "docs/how-to/containers.md says what podman needs."


def bridge_name(network: int) -> str:
    """Return the name of a cluster's bridge.

    The names of its network namespaces start with it.
    """
    return f"spt{network}"


def run(*command: str, stdin: str = "") -> str:
    """Run a command and return its output.

    Raises:
        OSError: It failed, or does not exist; the text has what it printed.
    """
    done = subprocess.run(command, input=stdin, capture_output=True, text=True, check=False)
    if done.returncode:
        raise OSError(f"`{' '.join(command[:3])}` failed: {last_line(done.stderr or done.stdout)}")
    return done.stdout


def last_line(text: str) -> str:
    """Return the last line of a program's output, without podman's prefix."""
    lines = text.strip().splitlines() or ["it printed nothing"]
    return lines[-1].removeprefix("Error: ")


def check_podman(probe: Path, scratch: Path) -> None:
    """Check that podman can run containers here, by running one.

    Args:
        probe: A statically linked program that accepts `--version`.
        scratch: A folder for the container's files.

    Raises:
        LocalClusterError: It cannot; the text says what is missing.
    """
    for tool, package in (("podman", "podman"), ("ip", "iproute2")):
        if not shutil.which(tool):
            raise LocalClusterError(
                f"The runtime podman needs `{tool}`, which is not installed. Install it (Debian, Ubuntu, Fedora: the "
                f"package {package}), or use `--runtime process`."
            )
    if os.geteuid() != 0:
        raise LocalClusterError(
            "The runtime podman needs root, because pods get addresses on a bridge of this machine. Run `spottrain "
            "local` as root, or use `--runtime process`."
        )
    root = scratch / "podman-check"
    root.mkdir(parents=True, exist_ok=True)
    mount = f"type=bind,src={probe},dst=/probe,ro=true"
    try:
        run(
            "podman",
            "run",
            "--rm",
            "--network=none",
            f"--mount={mount}",
            "--rootfs",
            str(root),
            "/probe",
            "--version",
        )
    except OSError as error:
        raise LocalClusterError(
            f"podman cannot run a container on this machine. {error}. {HOW_TO} Or use `--runtime process`."
        ) from error
    finally:
        shutil.rmtree(root, ignore_errors=True)


def remove_leftovers(network: int, node: str | None = None) -> None:
    """Remove the containers and network namespaces of a cluster or of one node.

    Raises:
        OSError: podman or ip failed; the text says what they printed.
    """
    filters = [f"--filter=label={NETWORK_LABEL}={network}"]
    if node is not None:
        filters.append(f"--filter=label={NODE_LABEL}={node}")
    if containers := run("podman", "ps", "--all", "--quiet", "--no-trunc", *filters).split():
        run("podman", "rm", "--force", "--time=0", *containers)
    remove_namespaces(namespaces(network, node))


def namespaces(network: int, node: str | None = None) -> list[str]:
    """List the network namespaces of a cluster, or of one of its nodes."""
    prefix = bridge_name(network) if node is None else f"{bridge_name(network)}.{node}"
    found = NAMESPACES.iterdir() if NAMESPACES.is_dir() else ()
    return sorted(path.name for path in found if path.name == prefix or path.name.startswith(f"{prefix}."))


def remove_namespaces(names: Sequence[str]) -> None:
    """Remove network namespaces, with the devices in them."""
    if names:
        run("ip", "-batch", "-", stdin="".join(f"netns delete {name}\n" for name in names))


def gateway_ip(network: int) -> str:
    """Return this machine's address on a cluster's bridge."""
    return f"10.{network}.0.1"


def create_bridge(network: int) -> None:
    """Create a cluster's bridge, after the removal of what an earlier run has left.

    It leads nowhere else.

    Raises:
        OSError: It could not be created; the text says why.
    """
    remove_cluster(network)
    name = bridge_name(network)
    run("ip", "link", "add", name, "type", "bridge")
    run("ip", "address", "add", f"{gateway_ip(network)}/16", "dev", name)
    run("ip", "link", "set", name, "up")


def remove_cluster(network: int) -> None:
    """Remove the containers, network namespaces and bridge of a cluster.

    Raises:
        OSError: podman or ip failed; the text says what they printed.
    """
    remove_leftovers(network)
    if (DEVICES / bridge_name(network)).exists():
        run("ip", "link", "delete", bridge_name(network))


def remove_dead_clusters() -> None:
    """Remove what is left of clusters that no longer run.

    Their supervisors were killed, or the machine went down.

    Raises:
        OSError: podman or ip failed; the text says what they printed.
    """
    for number in _networks():
        claim = claim_number(number)
        if claim:
            try:
                remove_cluster(number)
            finally:
                claim.release()


def _networks() -> list[int]:
    """Return the numbers of the networks that exist on this machine.

    The machine has a container, a network namespace or a bridge of each.
    """
    fields = f'--format={{{{index .Labels "{NETWORK_LABEL}"}}}}'
    labels = run("podman", "ps", "--all", f"--filter=label={NETWORK_LABEL}", fields).split()
    names = [bridge_name(int(label)) for label in labels]
    for folder in (NAMESPACES, DEVICES):
        names += [path.name.partition(".")[0] for path in folder.iterdir()] if folder.is_dir() else []
    return sorted({int(match[1]) for name in names if (match := _BRIDGE.fullmatch(name))})


def is_network_free(network: int) -> bool:
    """Return whether this machine has no route into a cluster's addresses.

    The cluster's own bridge doesn't count.
    """
    wanted = IPv4Network(f"10.{network}.0.0/16")
    for route in json.loads(run("ip", "-4", "-json", "route", "show", "table", "all") or "[]"):
        target = route["dst"]
        if target == "default" or route.get("dev") == bridge_name(network):
            continue
        if IPv4Network(target, strict=False).overlaps(wanted):
            return False
    return True
