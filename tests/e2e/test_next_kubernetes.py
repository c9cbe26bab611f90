"""Jobs on the next release of Kubernetes, on a local cluster with the operator as users have it.

Nightly, as a build of it takes minutes, and they need a cluster of their own. `make test-next-kubernetes` runs them
alone.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from cluster_fixtures import Kubectl
from e2e.rehearsal import num_redone, rehearsal
from shared_clusters import BRISK, RunFolder
from spottrain_local.cluster import Cluster
from spottrain_local.install import install_operator
from spottrain_local.spec import ClusterSpec, NodePool

pytestmark = [pytest.mark.cluster, pytest.mark.nightly, pytest.mark.timeout(600)]

NODES = ClusterSpec(
    kubernetes="1.37",
    nodes=[
        NodePool(name="system", gpus=0),
        NodePool(name="on-demand", count=2),
        NodePool(name="spot", count=2, capacity_type="spot"),
    ],
)


def _operate(cluster: Cluster) -> None:
    timing = {"name": "SPOTTRAIN_TIMING", "value": json.dumps(BRISK)}
    install_operator(cluster, {"operator": {"env": [timing]}})


@pytest.fixture(scope="module")
def next_cluster(run_folder: RunFolder) -> Cluster:
    return run_folder.cluster("next", NODES, _operate)


def test_a_job_trains_is_preempted_and_ends_on_the_next_kubernetes(next_cluster: Cluster, tmp_path: Path) -> None:
    kubectl = Kubectl(kubeconfig=next_cluster.kubeconfig)
    assert '"gitVersion": "v1.37.' in kubectl("version", "-o", "json")
    with rehearsal(next_cluster, "next", tmp_path, members=4) as run:
        [node, _] = run.spot_nodes()
        next_cluster.preempt([node], notice_seconds=30)
        run.wait("three members train on", lambda: len(run.members()) == 3)
        run.finish()
        assert num_redone(run.records()) == 0
