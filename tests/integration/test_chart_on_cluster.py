"""The chart on a real cluster.

The tests show what Helm prints about it, what it refuses, and what `helm test` finds.
"""

from __future__ import annotations

import copy
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import yaml

from cluster_fixtures import wait_for
from helm_release import HelmRelease, installed
from spottrain_api import crd
from spottrain_local.cluster import Cluster

pytestmark = pytest.mark.cluster

OF_ANOTHER_PROJECT: dict[str, Any] = {
    "apiVersion": "apiextensions.k8s.io/v1",
    "kind": "CustomResourceDefinition",
    "metadata": {"name": "podmonitors.monitoring.coreos.com"},
    "spec": {
        "group": "monitoring.coreos.com",
        "scope": "Namespaced",
        "names": {"kind": "PodMonitor", "plural": "podmonitors"},
        "versions": [
            {
                "name": "v1",
                "served": True,
                "storage": True,
                "schema": {"openAPIV3Schema": {"type": "object", "x-kubernetes-preserve-unknown-fields": True}},
            }
        ],
    },
}


@pytest.fixture(scope="module")
def release(whole_cluster: Cluster, tmp_path_factory: pytest.TempPathFactory) -> Iterator[HelmRelease]:
    """An installed release; what Helm printed then is in notes.txt."""
    folder = tmp_path_factory.mktemp("chart")
    release = HelmRelease(cluster=whole_cluster, folder=folder)
    with installed(release):
        (folder / "notes.txt").write_text(release(*release.upgrade("--wait", "--timeout", "90s", is_validated=True)))
        yield release


def installation_notes(release: HelmRelease) -> str:
    return (release.folder / "notes.txt").read_text()


def planned(release: HelmRelease, *values: str) -> str:
    """The notes of an upgrade with these values, which is not done."""
    options = [option for value in values for option in ("--set-json", value)]
    return release(*release.upgrade("--dry-run=server", *options)).partition("\nNOTES:\n")[2]


def test_the_notes_say_what_is_missing_and_what_comes_next(release: HelmRelease) -> None:
    notes = installation_notes(release)
    [missing] = [line for line in notes.splitlines() if line.startswith("- ")]
    assert missing.startswith("- No GPU: no node offers nvidia.com/gpu.")
    assert "helm test spottrain --namespace spottrain-system --logs" in notes
    assert "kubectl label namespace spottrain-system pod-security.kubernetes.io/enforce=privileged" in notes


@pytest.mark.parametrize(
    ("value", "missing"),
    [
        pytest.param(
            'watcher.affinity.nodeAffinity={"requiredDuringSchedulingIgnoredDuringExecution":{"nodeSelectorTerms":'
            '[{"matchExpressions":[{"key":"kubernetes.azure.com/scalesetpriority","operator":"In","values":["spot"]}]}'
            "]}}",
            "No spot node: none has the labels that `watcher.affinity` asks for.",
            id="spot nodes of another cloud",
        ),
        pytest.param('watcher.nodeSelector={"pool":"b"}', "No spot node", id="a pool that is not there"),
        pytest.param(
            'nodeSelector={"eks.amazonaws.com/capacityType":"SPOT"}',
            "The operator finds no node: none has the labels",
            id="spot nodes alone",
        ),
        pytest.param(
            "watcher.enabled=false", "No watcher of this release, as `watcher.enabled` is false", id="no watcher"
        ),
    ],
)
def test_the_notes_know_the_clusters_nodes(release: HelmRelease, value: str, missing: str) -> None:
    assert missing in planned(release, value)
    assert missing not in installation_notes(release)


def test_the_notes_know_labels_of_other_spot_nodes(release: HelmRelease) -> None:
    elsewhere = 'watcher.affinity={"nodeAffinity":{"requiredDuringSchedulingIgnoredDuringExecution":'
    elsewhere += '{"nodeSelectorTerms":[{"matchExpressions":[{"key":"a","operator":"Exists"}]}]}}}'
    assert "No spot node" in planned(release, elsewhere)
    assert "No spot node" not in planned(release, elsewhere, 'spotLabels={"eks.amazonaws.com/capacityType":"SPOT"}')


def test_the_notes_know_the_namespaces_pod_security(release: HelmRelease) -> None:
    label = "pod-security.kubernetes.io/enforce"
    release.kubectl("label", "namespace", release.namespace, f"{label}=baseline")
    try:
        notes = planned(release)
        assert 'The namespace spottrain-system enforces Pod Security "baseline", which refuses the watcher' in notes
        assert "enforces Pod Security" not in planned(release, "watcher.enabled=false")
    finally:
        release.kubectl("label", "--overwrite", "namespace", release.namespace, f"{label}=privileged")
    assert "enforces Pod Security" not in planned(release)


def test_an_older_crd_is_noticed_and_mended_by_an_upgrade(release: HelmRelease) -> None:
    assert "is that of another version" not in planned(release, "crds.enabled=false")
    older: dict[str, Any] = copy.deepcopy(crd.custom_resource_definition())
    fields = older["spec"]["versions"][0]["schema"]["openAPIV3Schema"]["properties"]["status"]["properties"]
    fields["ofAnOlderRelease"] = fields.pop("message")
    apply = "kubectl apply --server-side --force-conflicts --field-manager=helm -f -"
    release.kubectl(*apply.split()[1:], stdin=yaml.safe_dump(older))
    notes = planned(release, "crds.enabled=false")
    assert f"The CRD {crd.NAME} is that of another version. If this release is the newer one, upgrade the" in notes
    assert f"helm template CHART --show-only templates/crds.yaml | {apply}" in notes
    assert "is that of another version" not in planned(release)
    assert "FAILED: the cluster serves trainingjobs.spottrain.dev v1alpha1: the CRD" in checked(release).stdout
    release(*release.upgrade())
    assert "is that of another version" not in planned(release, "crds.enabled=false")


def test_a_second_operator_is_refused(release: HelmRelease) -> None:
    second = replace(release, name="mine", namespace="team-a")
    done = second.run(*second.upgrade())
    assert done.returncode != 0
    assert "The release spottrain in the namespace spottrain-system runs an operator in this cluster." in done.stderr
    assert "helm uninstall spottrain --namespace spottrain-system" in done.stderr
    beside = second.run(*second.upgrade("--set", "watchNamespaces.names={team-a}"))
    assert "The release spottrain in the namespace spottrain-system runs an operator" in beside.stderr


def test_releases_with_namespaces_of_their_own_share_a_cluster(release: HelmRelease) -> None:
    names = "watchNamespaces.names={default}"
    second = replace(release, name="mine", namespace="team-a")
    release(*release.upgrade("--set", names))
    try:
        owned = second.run(*second.upgrade("--set", "watchNamespaces.names={team-b}", "--dry-run=server"))
        assert "crds.enabled: the release spottrain in the namespace spottrain-system installs" in owned.stderr
        values = ("--set", "watchNamespaces.names={team-b},crds.enabled=false")
        planned = second.run(*second.upgrade(*values, "--dry-run=server"))
        assert planned.returncode == 0, planned.stderr
        both = second.run(*second.upgrade("--set", "watchNamespaces.names={team-b,default}", "--dry-run=server"))
        assert "give each release a namespace of its own and, by watchNamespaces, other namespaces" in both.stderr
        neighbour = replace(second, namespace=release.namespace)
        shared = neighbour.run(*neighbour.upgrade("--set", "watchNamespaces.names={team-b}", "--dry-run=server"))
        assert "runs an operator in this cluster" in shared.stderr
    finally:
        release(*release.upgrade("--wait", "--timeout", "90s"))


def test_monitoring_needs_its_operator(release: HelmRelease) -> None:
    for value, kind in (("podMonitor.enabled", "PodMonitor"), ("alerts.enabled", "PrometheusRule")):
        done = release.run(*release.upgrade("--dry-run=server", "--set", f"{value}=true"))
        assert done.returncode != 0
        assert f"{value} needs {kind} of the Prometheus operator, which this cluster does not have." in done.stderr
    release.kubectl("apply", "-f", "-", stdin=yaml.safe_dump(OF_ANOTHER_PROJECT))
    crd_of_another = ("crd", OF_ANOTHER_PROJECT["metadata"]["name"])
    try:
        release.kubectl("wait", "--for=condition=Established", "--timeout=30s", *crd_of_another)
        assert "kind: PodMonitor" in release(*release.upgrade("--dry-run=server", "--set", "podMonitor.enabled=true"))
    finally:
        release.kubectl("delete", *crd_of_another)


def test_helm_test_finds_the_installation_well(release: HelmRelease) -> None:
    wait_for(lambda: len(watchers(release)) == 2, "a watcher runs on each spot node")
    printed = release("test", release.name, "--logs", "--timeout", "90s")
    assert "ok: the operator leads and has observed the cluster" in printed
    assert f"ok: the cluster serves {crd.NAME} v1alpha1" in printed
    assert "ok: a watcher is ready on each spot node" in printed
    assert "ok: the watcher has its rights" in printed
    assert "FAILED" not in printed


def test_spot_nodes_without_a_watcher_are_noticed(release: HelmRelease) -> None:
    release(*release.upgrade("--set-json", 'watcher.command=["false"]'))
    try:
        wait_for(lambda: ready_watchers(release) < 2, "a watcher is gone")
        noted = f"the watcher was ready on {ready_watchers(release)} of 2 spot nodes. See"
        assert noted in planned(release)
        assert "FAILED: a watcher is ready on each spot node: no watcher is ready on" in checked(release).stdout
    finally:
        release(*release.upgrade())
    wait_for(lambda: ready_watchers(release) == 2, "both are back", 60)
    assert "the watcher was ready on" not in planned(release)


def ready_watchers(release: HelmRelease) -> int:
    daemonset = release.kubectl.get("daemonset", "spottrain-watcher", release.namespace)
    return int(daemonset["status"].get("numberReady", 0))


def test_rights_that_are_missing_are_named(release: HelmRelease) -> None:
    release.kubectl("delete", "clusterrolebinding", "spottrain-watcher")
    try:
        done = checked(release, "watcher")
    finally:
        release(*release.upgrade())
    assert done.returncode == 1
    assert "FAILED: the watcher has its rights: the service account of the watcher may not get nodes, " in done.stdout
    assert checked(release, "watcher").stdout == "ok: the watcher has its rights\n"


def watchers(release: HelmRelease) -> list[Any]:
    pods = release.kubectl.list("pod", release.namespace, "app.kubernetes.io/component=watcher")
    return [pod for pod in pods if pod["status"].get("phase") == "Running"]


def checked(release: HelmRelease, part: str = "operator") -> subprocess.CompletedProcess[str]:
    """The check of `helm test`, from outside of the cluster and without patience."""
    token = release.kubectl("--namespace", release.namespace, "create", "token", f"spottrain-{part}").strip()
    config = yaml.safe_load(release.cluster.kubeconfig.read_text())
    config["users"][0]["user"] = {"token": token}
    kubeconfig = release.folder / f"{part}.kubeconfig"
    kubeconfig.write_text(yaml.safe_dump(config))
    [pod] = release.kubectl.list("pod", release.namespace, "app.kubernetes.io/component=operator")
    port = pod["spec"]["containers"][0]["ports"][0]["containerPort"]
    command = [sys.executable, "-m", "spottrain_operator.selfcheck", part, "--patience", "0"]
    command += [
        "--watchers",
        "app.kubernetes.io/component=watcher",
        "--namespace",
        release.namespace,
        "--url",
        f"https://{pod['status']['podIP']}:{port}",
    ]
    env = {"KUBECONFIG": str(kubeconfig), "PATH": "/usr/bin:/bin"}
    return subprocess.run(command, env=env, capture_output=True, text=True, check=False, timeout=60)
