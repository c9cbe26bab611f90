"""Jobs on the next release of Kubernetes, on a local cluster with the operator as users have it.

Nightly, as a build of it takes minutes, and they need a cluster of their own. `make test-next-kubernetes` runs them
alone.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from cluster_api import PATHS
from cluster_fixtures import Kubectl
from e2e.rehearsal import Rehearsal, manifest, num_redone, rehearsal
from shared_clusters import BRISK, RunFolder
from spottrain_api.contract.names import LABEL_JOB
from spottrain_local.cluster import Cluster
from spottrain_local.install import install_operator
from spottrain_local.spec import ClusterSpec, NodePool

pytestmark = [pytest.mark.cluster, pytest.mark.nightly, pytest.mark.timeout(600)]

PATHS |= {"podgroup": "apis/scheduling.k8s.io/v1beta1/{}podgroups"}
NODES = ClusterSpec(
    kubernetes="1.37",
    nodes=[
        NodePool(name="system", gpus=0),
        NodePool(name="on-demand", count=2, gpus=1),
        NodePool(name="spot", count=2, gpus=1, capacity_type="spot"),
    ],
)
PATIENCE = 120.0


def _operate(cluster: Cluster) -> None:
    timing = {"name": "SPOTTRAIN_TIMING", "value": json.dumps(BRISK)}
    install_operator(cluster, {"operator": {"env": [timing]}, "jobs": {"podGroups": True}})


@pytest.fixture(scope="module")
def next_cluster(run_folder: RunFolder) -> Cluster:
    return run_folder.cluster("next", NODES, _operate)


@pytest.fixture
def kubectl(next_cluster: Cluster) -> Kubectl:
    return Kubectl(kubeconfig=next_cluster.kubeconfig)


def of_job(kubectl: Kubectl, kind: str, job: str) -> list[Any]:
    return kubectl.list(kind, labels=f"{LABEL_JOB}={job}")


def test_a_job_trains_is_preempted_and_ends_on_the_next_kubernetes(
    next_cluster: Cluster, kubectl: Kubectl, tmp_path: Path
) -> None:
    assert '"gitVersion": "v1.37.' in kubectl("version", "-o", "json")
    with rehearsal(next_cluster, "next", tmp_path, members=4) as run:
        [node, _] = run.spot_nodes()
        next_cluster.preempt([node], notice_seconds=30)
        run.wait("three members train on", lambda: len(run.members()) == 3, PATIENCE)
        run.bring_back()
        run.wait("it grows again", lambda: len(run.members()) == 4, PATIENCE)
        run.finish()
        assert num_redone(run.records()) == 0
    run.wait("its PodGroup goes with it", lambda: not of_job(kubectl, "podgroup", "next"), PATIENCE)


def test_of_two_jobs_that_need_all_nodes_one_runs_and_the_other_holds_none(
    next_cluster: Cluster, kubectl: Kubectl, tmp_path: Path
) -> None:
    all_nodes: dict[str, Any] = {
        "nodes": {"min": 4, "max": 4},
        "capacity": {"onDemand": {"min": 2, "max": 2}, "spot": {"max": 2}, "fallback": {"policy": "None"}},
    }
    with rehearsal(next_cluster, "first", tmp_path / "first", members=4, **all_nodes) as first:
        second = Rehearsal(cluster=next_cluster, name="second", folder=tmp_path / "second")
        second.apply(manifest("second", second.folder, **all_nodes))
        try:
            second.wait("its pods are there", lambda: len(of_job(kubectl, "pod", "second")) == 4, PATIENCE)
            kubectl.patch("tj", "first", {"spec": {"nodes": {"min": 3, "max": 3}}})
            first.wait("the first one trains on with three", lambda: len(first.members()) == 3, PATIENCE)
            [group] = of_job(kubectl, "podgroup", "first")
            assert group["spec"]["schedulingPolicy"]["gang"]["minCount"] == 3
            kubectl.create(PASSER_BY)
            second.wait("the free node goes to somebody else", lambda: node_of(kubectl, "passer-by"), PATIENCE)
            assert not [pod for pod in of_job(kubectl, "pod", "second") if pod["spec"].get("nodeName")]
            kubectl.delete("pod", "passer-by")
            first.finish()
            second.wait("the second one has all nodes", lambda: len(second.members()) == 4, PATIENCE)
            second.finish()
        finally:
            kubectl.run("delete", "pod", "passer-by", "--ignore-not-found", "--wait=false")
            kubectl.run("delete", "tj", "second", "--wait=false")


# It comes after the second job. Without its group, a pod of that one would have the node.
PASSER_BY = {
    "apiVersion": "v1",
    "kind": "Pod",
    "metadata": {"name": "passer-by"},
    "spec": {
        "nodeSelector": {"eks.amazonaws.com/capacityType": "SPOT"},
        "terminationGracePeriodSeconds": 0,
        "containers": [
            {
                "name": "c",
                "image": "local/sleep",
                "command": ["sleep", "600"],
                "resources": {"limits": {"nvidia.com/gpu": "1"}},
            }
        ],
    },
}


def node_of(kubectl: Kubectl, pod: str) -> str:
    return str(kubectl.get("pod", pod)["spec"].get("nodeName", ""))
