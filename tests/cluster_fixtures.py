"""Throw-away local clusters for tests, and the ways in which tests look at them."""

import os
import shutil
import signal
import subprocess
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

import psutil

from cluster_api import ClusterApi
from spottrain_local.cluster import Cluster
from spottrain_local.install import find_kubectl
from spottrain_local.layout import ClusterLayout
from spottrain_local.spec import ClusterSpec, NodePool

SMALL = ClusterSpec(
    nodes=[
        NodePool(name="system", gpus=0),
        NodePool(name="on-demand"),
        NodePool(name="spot", count=2, capacity_type="spot"),
    ]
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Kubectl(ClusterApi):
    """kubectl with the kubeconfig of one cluster, for what only kubectl shows."""

    def create_namespace(self, name: str, labels: dict[str, str] | None = None) -> None:
        """Create a namespace, and wait until pods can be created in it."""
        metadata = {"name": name, "labels": labels or {}}
        self.create({"apiVersion": "v1", "kind": "Namespace", "metadata": metadata})
        wait_for(lambda: self.has("serviceaccount", "default", name), f"{name} has a service account")

    def delete_definitions(self, names: Iterable[str]) -> None:
        """Delete those of these CRDs that are there, and their objects. Fails with what holds one up."""
        kind = "customresourcedefinition"
        left = [name for name in names if self.has(kind, name)]
        for name in left:
            self.delete(kind, name)
        try:
            wait_for(lambda: not any(self.has(kind, name) for name in left), "the CRDs are gone", seconds=120)
        except AssertionError as error:
            held = [self.get(kind, name)["status"]["conditions"] for name in left if self.has(kind, name)]
            raise AssertionError(f"{error}: {held}") from error

    def __call__(self, *args: str, stdin: str | None = None) -> str:
        """What kubectl prints; fails the test with what it complains about."""
        done = self.run(*args, stdin=stdin)
        assert done.returncode == 0, f"kubectl {' '.join(args)}: {done.stderr}"
        return done.stdout

    def run(self, *args: str, stdin: str | None = None) -> subprocess.CompletedProcess[str]:
        """Run kubectl, whatever comes of it."""
        command = [find_kubectl(), f"--kubeconfig={self.kubeconfig}", *args]
        return subprocess.run(command, input=stdin, capture_output=True, text=True, check=False, timeout=120)


def wait_for(condition: Callable[[], object], what: str, seconds: float = 30.0) -> None:
    """Wait until a condition holds; fails the test with `what` was missing.

    What takes long to look at is looked at less often: looking takes processors from what is waited for.
    """
    deadline = time.monotonic() + seconds
    started = time.monotonic()
    while not condition():
        assert time.monotonic() < deadline, f"not within {seconds:.0f} s: {what}"
        time.sleep(max(0.05, 3 * (time.monotonic() - started)))
        started = time.monotonic()


def processes_of(root: Path) -> list[psutil.Process]:
    """The living processes of the cluster with this state folder.

    `info` has their names.

    Their command or environment names the folder.
    """
    found = []
    for process in psutil.process_iter(["name"]):
        try:
            if process.status() == psutil.STATUS_ZOMBIE or process.pid == os.getpid():
                continue
            if str(root) in " ".join(process.cmdline()) or str(root) in " ".join(process.environ().values()):
                found.append(process)
        except psutil.Error:  # it ended, or is another user's
            continue
    return found


def end_cluster(cluster: Cluster) -> None:
    """End a cluster, with everything that belongs to it."""
    root = cluster.layout.root
    try:
        cluster.down()
    finally:
        for process in processes_of(root):
            with suppress(psutil.NoSuchProcess):  # some die with another
                process.send_signal(signal.SIGKILL)
        # pytest keeps the folders of the last runs; the logs are worth that, the rest isn't.
        for folder in (cluster.layout.etcd, cluster.layout.object_store, root / "nodes"):
            shutil.rmtree(folder, ignore_errors=True)


@contextmanager
def throw_away_cluster(root: Path, spec: ClusterSpec = SMALL) -> Iterator[Cluster]:
    """Run a cluster with its state in this folder while the block runs, whatever happens there."""
    cluster = Cluster(layout=ClusterLayout(root=root))
    try:
        cluster.up(spec)
        yield cluster
    finally:
        end_cluster(cluster)
