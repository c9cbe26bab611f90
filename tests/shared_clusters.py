"""Local clusters that the processes of one test run share.

The first test that needs a cluster starts it, in whatever process it runs. The cluster ends with the process that the
user started. If that one is killed, the cluster's guard ends it.
"""

from __future__ import annotations

import fcntl
import json
import os
import select
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import pytest

from cluster_fixtures import SMALL, Kubectl, end_cluster, throw_away_cluster, wait_for
from rendered_objects import objects_in
from spottrain_api.crd import CRDS, definitions
from spottrain_local.cluster import Cluster
from spottrain_local.install import install_operator
from spottrain_local.layout import ClusterLayout
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

    def cluster(self, name: str, spec: ClusterSpec, prepare: Callable[[Cluster], None]) -> Cluster:
        """The running cluster of this name; `prepare` was called for it once."""
        self.path.mkdir(exist_ok=True)
        cluster, prepared = Cluster(layout=ClusterLayout(root=self.path / name)), self.path / f"{name}.prepared"
        with (self.path / f"{name}.lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            if not prepared.exists():
                command = [sys.executable, __file__, str(cluster.layout.root), str(self.owner)]
                subprocess.Popen(command, stdin=subprocess.DEVNULL, start_new_session=True)
                cluster.up(spec)
                prepare(cluster)
                prepared.touch()
        return cluster


@pytest.fixture(scope="session")
def run_folder(tmp_path_factory: pytest.TempPathFactory) -> RunFolder:
    own = tmp_path_factory.getbasetemp()
    if "PYTEST_XDIST_WORKER" in os.environ:
        return RunFolder(path=_shared(own.parent), owner=os.getppid())
    return RunFolder(path=_shared(own), owner=os.getpid())


def _shared(folder_of_the_run: Path) -> Path:
    return folder_of_the_run / "clusters"


@pytest.hookimpl(trylast=True)
def pytest_unconfigure(config: pytest.Config) -> None:
    """End the clusters after the workers have ended."""
    if not hasattr(config, "workerinput"):
        for file in _shared(config._tmp_path_factory.getbasetemp()).glob("*.lock"):  # type: ignore[attr-defined]
            end_cluster(Cluster(layout=ClusterLayout(root=file.with_suffix(""))))


@pytest.fixture(scope="session")
def whole_cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    """A cluster for tests that break, or change for all, what belongs to the whole cluster.

    One test uses it at a time. It leaves no CRDs, and what it stops runs again. The nodes are those of SMALL, without
    GPUs.
    """
    with throw_away_cluster(tmp_path_factory.mktemp("whole") / "cluster", WHOLE) as cluster:
        yield cluster


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
    return run_folder.cluster("shared", SHARED, _define)


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
    return run_folder.cluster("with-operator", WITH_OPERATOR, _operate)


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
