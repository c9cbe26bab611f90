"""Local clusters that the processes of one test run share.

The first test that needs a cluster starts it, in whatever process it runs. The process that the user started ends it
after the last test that may use it. If that process is killed, the cluster's guard ends it.
"""

from __future__ import annotations

import fcntl
import json
import os
import select
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import pytest

from cluster_fixtures import SMALL, Kubectl, end_cluster, wait_for
from rendered_objects import objects_in
from spottrain_api.crd import CRDS, definitions
from spottrain_local.cluster import Cluster
from spottrain_local.install import install_operator
from spottrain_local.layout import ClusterLayout, write_atomically
from spottrain_local.spec import ClusterSpec, NodePool, TaintSpec

# A node for the tests that drain one: pods of other tests can't get there.
DRAINED = NodePool(
    name="drained",
    capacity_type="spot",
    taints=[TaintSpec(key="tests.spottrain.dev/drained", effect="NoSchedule")],
)
SHARED = ClusterSpec(nodes=[*SMALL.nodes, DRAINED])

# Without GPUs, so that the chart has something to miss.
WHOLE = ClusterSpec(nodes=[pool.model_copy(update={"gpus": 0}) for pool in SMALL.nodes])
# Durations of decisions that only cost a test time, mostly at a fifth. Those by which an operator knows who is alive
# stay: the machine is busy.
BRISK = {
    "first_generation_patience": 8.0,
    "growth_interval": 4.0,
    "growth_patience": 3.0,
    "growth_patience_while_coming": 9.0,
    "start_failure_patience": 4.0,
    "start_failure_pause": 1.0,
    "refusal_patience": 2.0,
}
# With room for many small jobs at once. Only pods that tolerate its taint can get there.
ROOMY = NodePool(
    name="roomy",
    gpus=16,
    cpu="64",
    labels={"tests.spottrain.dev/for": "many-jobs"},
    taints=[TaintSpec(key="tests.spottrain.dev/for", value="many-jobs", effect="NoSchedule")],
)
WITH_OPERATOR = ClusterSpec(
    nodes=[
        NodePool(name="system", gpus=0),
        NodePool(name="on-demand", count=2),
        NodePool(name="spot", count=2, capacity_type="spot"),
        NodePool(name="gke-spot", provider="gke", capacity_type="spot"),
        NodePool(name="aks-spot", provider="aks", capacity_type="spot"),
        ROOMY,
    ]
)


@dataclass(frozen=True, slots=True, kw_only=True)
class RunFolder:
    """Where the processes of a test run keep what they share.

    `owner` is the process that the user started.
    """

    path: Path
    owner: int

    @classmethod
    def of(cls, config: pytest.Config) -> RunFolder:
        own: Path = config._tmp_path_factory.getbasetemp()  # type: ignore[attr-defined]
        if _is_worker(config):
            return cls(path=own.parent / "clusters", owner=os.getppid())
        return cls(path=own / "clusters", owner=os.getpid())

    def cluster(self, name: str, spec: ClusterSpec, prepare: Callable[[Cluster], None]) -> Cluster:
        """The running cluster of this name; `prepare` was called for it once."""
        cluster, prepared = self._cluster(name), self._prepared(name)
        with self._locked(name):
            if not prepared.exists():
                command = [sys.executable, __file__, str(cluster.layout.root), str(self.owner)]
                subprocess.Popen(command, stdin=subprocess.DEVNULL, start_new_session=True)
                cluster.up(spec)
                prepare(cluster)
                prepared.touch()
        return cluster

    def end(self, name: str) -> None:
        """End the cluster of this name, if it runs."""
        with self._locked(name):
            end_cluster(self._cluster(name))
            self._prepared(name).unlink(missing_ok=True)

    def end_all(self) -> None:
        for lock in self.path.glob("*.lock"):
            self.end(lock.stem)

    @property
    def users(self) -> Path:
        """The ids of the tests that may use each cluster, as JSON."""
        return self.path / "users.json"

    def _cluster(self, name: str) -> Cluster:
        return Cluster(layout=ClusterLayout(root=self.path / name))

    def _prepared(self, name: str) -> Path:
        return self.path / f"{name}.prepared"

    @contextmanager
    def _locked(self, name: str) -> Iterator[None]:
        self.path.mkdir(exist_ok=True)
        with (self.path / f"{name}.lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            yield


def _is_worker(config: pytest.Config) -> bool:
    """Whether it is a process of xdist, and not the one that the user started."""
    return hasattr(config, "workerinput")


@pytest.fixture(scope="session")
def run_folder(pytestconfig: pytest.Config) -> RunFolder:
    return RunFolder.of(pytestconfig)


# Clusters by their fixtures.
CLUSTERS = {"local_cluster": "shared", "operator_cluster": "with-operator", "whole_cluster": "whole"}


def _clusters_for(item: pytest.Item) -> set[str]:
    """The clusters that a test may use. One that shows no fixture may ask for `local_cluster` while it runs."""
    shown = {name for fixture, name in CLUSTERS.items() if fixture in getattr(item, "fixturenames", ())}
    is_unit = "unit" in item.path.parts
    if item.get_closest_marker("cluster") is None or is_unit:
        return shown
    return shown or {CLUSTERS["local_cluster"]}


@pytest.hookimpl(trylast=True)
def pytest_collection_finish(session: pytest.Session) -> None:
    """Write down who uses the clusters. All processes of xdist collect the same tests."""
    users: dict[str, list[str]] = {}
    for item in session.items:
        for name in _clusters_for(item):
            users.setdefault(name, []).append(item.nodeid)
    if users:
        folder = RunFolder.of(session.config)
        folder.path.mkdir(exist_ok=True)
        write_atomically(folder.users, json.dumps(users))


class ClusterEnds:
    """Ends each cluster after the last test that may use it: one that idles takes 3 % of a processor, and memory."""

    def __init__(self, config: pytest.Config) -> None:
        self._config = config
        self._ending: list[threading.Thread] = []

    @cached_property
    def _folder(self) -> RunFolder:
        return RunFolder.of(self._config)

    @cached_property
    def _users(self) -> dict[str, set[str]]:
        users = self._folder.users
        return {name: set(ids) for name, ids in json.loads(users.read_text()).items()} if users.exists() else {}

    def pytest_runtest_logfinish(self, nodeid: str) -> None:
        for name, left in self._users.items():
            if nodeid in left:
                left.remove(nodeid)
                if not left:
                    self._ending.append(threading.Thread(target=self._folder.end, args=(name,)))
                    self._ending[-1].start()

    @pytest.hookimpl(trylast=True)
    def pytest_unconfigure(self) -> None:
        """End those that are left, after the workers have ended."""
        for thread in self._ending:
            thread.join()
        self._folder.end_all()


def pytest_configure(config: pytest.Config) -> None:
    if not _is_worker(config):
        config.pluginmanager.register(ClusterEnds(config), "ends of clusters")


@pytest.fixture(scope="session")
def whole_cluster(run_folder: RunFolder) -> Cluster:
    """A cluster for tests that break, or change for all, what belongs to the whole cluster.

    One test uses it at a time. It leaves no CRDs, and what it stops runs again. The nodes are those of SMALL, without
    GPUs.
    """
    return run_folder.cluster(CLUSTERS["whole_cluster"], WHOLE, lambda cluster: None)


@pytest.fixture
def whole_kubectl(whole_cluster: Cluster) -> Iterator[Kubectl]:
    """kubectl for `whole_cluster`, which has the CRDs while the test runs."""
    kubectl = Kubectl(kubeconfig=whole_cluster.kubeconfig)
    _define(whole_cluster)
    yield kubectl
    kubectl.delete_definitions(definitions())


@pytest.fixture(scope="session")
def local_cluster(run_folder: RunFolder) -> Cluster:
    """A running cluster with the CRDs and without the operator, shared by the whole run.

    It has one system, one on-demand and two spot nodes (EKS). Use a namespace of your own, and change nothing that
    belongs to the whole cluster: other tests run on it now.
    """
    return run_folder.cluster(CLUSTERS["local_cluster"], SHARED, _define)


def _define(cluster: Cluster) -> None:
    kubectl = Kubectl(kubeconfig=cluster.kubeconfig)
    for file in sorted(CRDS.glob("*.yaml")):
        [definition] = objects_in(file.read_text())
        kubectl.apply(definition)
    wait_for(lambda: kubectl.serves("tj", "tjh"), "the CRDs are served")


@pytest.fixture
def kubectl(local_cluster: Cluster) -> Kubectl:
    """kubectl for `local_cluster`."""
    return Kubectl(kubeconfig=local_cluster.kubeconfig)


@pytest.fixture(scope="session")
def operator_cluster(run_folder: RunFolder) -> Cluster:
    """A cluster with the operator, as a user has it, shared by the end-to-end tests.

    It has 1 system, 2 on-demand and 4 spot nodes, of three clouds, and a roomy one. Each test leaves all nodes.
    """
    return run_folder.cluster(CLUSTERS["operator_cluster"], WITH_OPERATOR, _operate)


def _operate(cluster: Cluster) -> None:
    timing = {"name": "SPOTTRAIN_TIMING", "value": json.dumps(BRISK)}
    install_operator(cluster, {"operator": {"env": [timing]}})


def _guard(root: Path, owner: int) -> None:
    """End the cluster when its owner has ended without doing so."""
    with suppress(ProcessLookupError):
        ended = os.pidfd_open(owner)
        select.select([ended], [], [])
    end_cluster(Cluster(layout=ClusterLayout(root=root)))


if __name__ == "__main__":
    _guard(Path(sys.argv[1]), int(sys.argv[2]))
