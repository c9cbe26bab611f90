"""A throw-away local cluster for tests, and the ways in which tests look at it."""

import os
import shutil
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import psutil
import pytest
import yaml

from spottrain_api.contract.names import GROUP, PLURAL, VERSION
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


# Where the API has what tests look at; kubectl's names for it.
PATHS = {
    "configmap": "api/v1/{}configmaps",
    "daemonset": "apis/apps/v1/{}daemonsets",
    "deployment": "apis/apps/v1/{}deployments",
    "events": "api/v1/{}events",
    "lease": "apis/coordination.k8s.io/v1/{}leases",
    "node": "api/v1/nodes",
    "pod": "api/v1/{}pods",
    "secret": "api/v1/{}secrets",
    "service": "api/v1/{}services",
    "tj": f"apis/{GROUP}/{VERSION}/{{}}{PLURAL}",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Kubectl:
    """kubectl with the kubeconfig of one cluster.

    `get` goes through a client: each kubectl costs a tenth of a second of a processor, and tests look often.
    """

    kubeconfig: Path

    def __call__(self, *args: str, stdin: str | None = None) -> str:
        """What kubectl prints; fails the test with what it complains about."""
        done = self.run(*args, stdin=stdin)
        assert done.returncode == 0, f"kubectl {' '.join(args)}: {done.stderr}"
        return done.stdout

    def run(self, *args: str, stdin: str | None = None) -> subprocess.CompletedProcess[str]:
        """Run kubectl, whatever comes of it."""
        command = [find_kubectl(), f"--kubeconfig={self.kubeconfig}", *args]
        return subprocess.run(command, input=stdin, capture_output=True, text=True, check=False, timeout=120)

    def get(self, kind: str, name: str, namespace: str = "default") -> Any:
        """An object as JSON has it; kubernetes.client.ApiException where there is none."""
        return self._read(f"{PATHS[kind].format(f'namespaces/{namespace}/')}/{name}")

    def list(self, kind: str, namespace: str = "default", labels: str = "") -> list[Any]:
        """The objects with these labels, as JSON has them."""
        path = PATHS[kind].format(f"namespaces/{namespace}/")
        return list(self._read(path, labelSelector=labels)["items"])

    def replace(self, kind: str, content: Any) -> Any:
        """Replace an object, as kubectl does.

        Raises:
            kubernetes.client.ApiException: The API server refuses it.
        """
        meta = content["metadata"]
        path = PATHS[kind].format(f"namespaces/{meta['namespace']}/")
        return self._call("PUT", f"{path}/{meta['name']}", content, fieldValidation="Strict")

    def _read(self, path: str, **query: str) -> Any:
        return self._call("GET", path, **query)

    def _call(self, method: str, path: str, content: Any = None, **query: str) -> Any:
        client = _client(self.kubeconfig, self.kubeconfig.stat().st_mtime_ns)
        request = client.param_serialize(
            method,
            f"/{path}",
            header_params={"Content-Type": "application/json"},
            query_params=[item for item in query.items() if item[1]],
            body=content,
            auth_settings=["BearerToken"],
        )
        answer = client.call_api(*request)
        answer.read()
        return client.response_deserialize(answer, {"default": "object"}).data

    def ready_nodes(self) -> set[str]:
        """Names of the nodes that are Ready."""
        return {
            node["metadata"]["name"]
            for node in self.list("node")
            if any(c["type"] == "Ready" and c["status"] == "True" for c in node["status"].get("conditions", []))
        }


@cache
def _client(kubeconfig: Path, changed_at: int) -> Any:
    import kubernetes  # takes a second and a half, and conftest.py loads this module for all tests

    # It writes the kubeconfig's keys to files; workers of pytest end without tidying up.
    config = yaml.safe_load(kubeconfig.read_text())
    return kubernetes.config.new_client_from_config_dict(config, temp_file_path=str(kubeconfig.parent))


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


@contextmanager
def throw_away_cluster(root: Path, spec: ClusterSpec = SMALL) -> Iterator[Cluster]:
    """Run a cluster with its state in this folder while the block runs.

    Whatever happens, the cluster ends, with everything that belongs to it.
    """
    cluster = Cluster(layout=ClusterLayout(root=root))
    try:
        cluster.up(spec)
        yield cluster
    finally:
        try:
            cluster.down()
        finally:
            for process in processes_of(root):
                with suppress(psutil.NoSuchProcess):  # some die with another
                    process.send_signal(signal.SIGKILL)
            # pytest keeps the folders of the last runs; the logs are worth that, the rest isn't.
            for folder in (cluster.layout.etcd, cluster.layout.object_store, root / "nodes"):
                shutil.rmtree(folder, ignore_errors=True)


@pytest.fixture(scope="session")
def local_cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    """A running cluster without the operator, shared by the whole run.

    It has one system, one on-demand and two spot nodes (EKS). Use a namespace of your own, and `restore` the nodes
    that you take.
    """
    with throw_away_cluster(tmp_path_factory.mktemp("local-cluster") / "shared") as cluster:
        yield cluster


@pytest.fixture
def kubectl(local_cluster: Cluster) -> Kubectl:
    """kubectl for `local_cluster`."""
    return Kubectl(kubeconfig=local_cluster.kubeconfig)
