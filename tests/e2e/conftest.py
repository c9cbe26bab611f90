"""The cluster of end-to-end tests: with the operator installed, as a user has it."""

from collections.abc import Iterator

import pytest

from cluster_fixtures import throw_away_cluster
from spottrain_local.cluster import Cluster
from spottrain_local.install import install_operator
from spottrain_local.spec import ClusterSpec, NodePool

SPEC = ClusterSpec(
    nodes=[
        NodePool(name="system", gpus=0),
        NodePool(name="on-demand", count=2),
        NodePool(name="spot", count=2, capacity_type="spot"),
        NodePool(name="gke-spot", provider="gke", capacity_type="spot"),
        NodePool(name="aks-spot", provider="aks", capacity_type="spot"),
    ]
)


@pytest.fixture(scope="session")
def operator_cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    """A cluster with the operator, shared by the whole run.

    It has 1 system, 2 on-demand and 4 spot nodes, of three clouds. Each test leaves all nodes, and no job.
    """
    with throw_away_cluster(tmp_path_factory.mktemp("e2e") / "cluster", SPEC) as cluster:
        install_operator(cluster)
        yield cluster
