"""spottrain is installed into a local cluster as into any other.

The installation uses the Helm chart, which contains the CRDs.
"""

from pathlib import Path

import pytest

from cluster_fixtures import SMALL, Kubectl, throw_away_cluster
from helm_release import HelmRelease, older_chart
from spottrain_local.install import NAMESPACE, install_operator

pytestmark = pytest.mark.cluster


def test_the_operator_is_installed_and_upgraded(tmp_path: Path) -> None:
    with throw_away_cluster(tmp_path / "install", SMALL) as cluster:
        kubectl = Kubectl(kubeconfig=cluster.kubeconfig)
        # A developer may have applied the CRDs of another version by hand.
        kubectl("apply", "--server-side", "-f", str(older_chart(tmp_path) / "definitions"))
        install_operator(cluster)
        pods = kubectl.list("pod", NAMESPACE)
        by_part = {pod["metadata"]["name"].split("-")[1]: pod["spec"]["nodeName"] for pod in pods}
        assert by_part["operator"] == "system-0"
        assert by_part["watcher"].startswith("spot-")
        kubectl("get", "tj,tjh", "-A")
        assert HelmRelease(cluster=cluster, folder=tmp_path).has_newer_crd()
        install_operator(cluster)
        again = kubectl.list("pod", NAMESPACE)
        assert {pod["metadata"]["uid"] for pod in again} == {pod["metadata"]["uid"] for pod in pods}
