"""spottrain is installed into a local cluster as into any other.

The installation uses the CRD and the Helm chart.
"""

from pathlib import Path

import pytest

from cluster_fixtures import SMALL, Kubectl, throw_away_cluster
from spottrain_local.install import NAMESPACE, install_operator

pytestmark = pytest.mark.cluster


def test_the_operator_is_installed_and_upgraded(tmp_path: Path) -> None:
    with throw_away_cluster(tmp_path / "install", SMALL) as cluster:
        kubectl = Kubectl(kubeconfig=cluster.kubeconfig)
        install_operator(cluster)
        pods = kubectl.list("pod", NAMESPACE)
        by_part = {pod["metadata"]["name"].split("-")[1]: pod["spec"]["nodeName"] for pod in pods}
        assert by_part["operator"] == "system-0"
        assert by_part["watcher"].startswith("spot-")
        kubectl("get", "tj", "-A")
        install_operator(cluster)
        again = kubectl.list("pod", NAMESPACE)
        assert {pod["metadata"]["uid"] for pod in again} == {pod["metadata"]["uid"] for pod in pods}
