"""The cluster of end-to-end tests: with the operator installed, as a user has it."""

from collections.abc import Iterator

import pytest

from cluster_fixtures import throw_away_cluster
from spottrain_local.cluster import Cluster
from spottrain_local.install import install_operator
from spottrain_local.spec import DEFAULT_SPEC


@pytest.fixture(scope="session")
def operator_cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    """A cluster with the operator: 1 system, 2 on-demand and 4 spot nodes.

    One for the whole run: each test leaves all nodes, and no job.
    """
    with throw_away_cluster(tmp_path_factory.mktemp("e2e") / "cluster", DEFAULT_SPEC) as cluster:
        install_operator(cluster)
        yield cluster
