"""spottrain is installed into a local cluster as into any other.

The installation uses the Helm chart, which contains the CRDs.
"""

from pathlib import Path

import pytest
from click.testing import CliRunner

from helm_release import HelmRelease, installed, older_chart
from spottrain_local.binaries import CONTROL_PLANE, find_binaries
from spottrain_local.cli import local
from spottrain_local.cluster import Cluster, open_cluster
from spottrain_local.install import NAMESPACE, install_operator

pytestmark = pytest.mark.cluster


def test_the_operator_is_installed_and_upgraded(
    whole_cluster: Cluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cluster, release = whole_cluster, HelmRelease(cluster=whole_cluster, folder=tmp_path)
    with installed(release):
        kubectl = release.kubectl
        # A developer may have applied the CRDs of another version by hand.
        kubectl("apply", "--server-side", "-f", str(older_chart(tmp_path) / "definitions"))
        monkeypatch.setenv("KUBECACHEDIR", str(tmp_path / "discovery"))
        install_operator(cluster)
        # What Helm learned before the CRDs were there would keep `kubectl explain tj` from finding them.
        assert not (tmp_path / "discovery").exists()
        pods = kubectl.list("pod", NAMESPACE)
        by_part = {pod["metadata"]["name"].split("-")[1]: pod["spec"]["nodeName"] for pod in pods}
        assert by_part["operator"] == "system-0"
        assert by_part["watcher"].startswith("spot-")
        kubectl("get", "tj,tjh", "-A")
        assert release.has_newer_crd()
        install_operator(cluster)
        again = kubectl.list("pod", NAMESPACE)
        assert {pod["metadata"]["uid"] for pod in again} == {pod["metadata"]["uid"] for pod in pods}


def test_a_cluster_whose_installation_fails_stays_up_and_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assets = tmp_path / "assets"
    assets.mkdir()
    for name in CONTROL_PLANE:
        (assets / name).symlink_to(find_binaries().path(name))
    (assets / "helm").write_text("#!/bin/sh\necho Error: no such chart >&2; exit 1\n")
    (assets / "helm").chmod(0o755)
    monkeypatch.setenv("KUBEBUILDER_ASSETS", str(assets))
    monkeypatch.setenv("SPOTTRAIN_LOCAL_HOME", str(tmp_path / "home"))
    nodes = tmp_path / "nodes.yaml"
    nodes.write_text("nodes: []\n")
    cluster = open_cluster("broken")
    try:
        failed = CliRunner().invoke(local, ["up", "--name", "broken", "--nodes", str(nodes)])
        assert failed.exit_code == 1
        assert "Error: no such chart" in failed.output
        assert (
            "The cluster broken runs, as far as it came. `spottrain local up --name broken` continues, "
            "and `spottrain local down --name broken` stops it."
        ) in failed.output
        assert cluster.status() is not None
        (assets / "helm").write_text("#!/bin/sh\nexit 0\n")
        assert CliRunner().invoke(local, ["up", "--name", "broken"]).exit_code == 0
    finally:
        cluster.down()
