"""`kubectl cordon` and `drain`, evictions and PodDisruptionBudgets.

The nodes use both runtimes.
"""

from __future__ import annotations

import json
import subprocess
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from cluster_fixtures import Kubectl, throw_away_cluster, wait_for
from shared_clusters import DRAINED
from spottrain_local.install import find_kubectl
from spottrain_local.spec import ClusterSpec

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(200)]

NAMESPACE, [NODE] = "drain", DRAINED.node_names()
DRAIN = ("drain", NODE, "--ignore-daemonsets", "--delete-emptydir-data")
# Takes its time to end, and says so.
POLITE = "trap 'echo ending; sleep 0.2; echo ended; exit' TERM; echo ready; while :; do sleep 0.05; done"
DEAF = "trap 'echo heard' TERM; echo ready; while :; do sleep 0.05; done"


@dataclass(frozen=True, slots=True, kw_only=True)
class Site:
    """A node, and pods that run on it alone."""

    kubectl: Kubectl
    image: str

    def pod(self, script: str, **spec: Any) -> dict[str, Any]:
        container: dict[str, Any] = {"name": "c", "image": self.image, "imagePullPolicy": "IfNotPresent"}
        container |= {"command": ["sh", "-c", script]}
        toleration = {"key": DRAINED.taints[0].key, "operator": "Exists"}
        place = {"nodeSelector": {"kubernetes.io/hostname": NODE}, "tolerations": [toleration]}
        return {"containers": [container], **place, **spec}

    def set_of(self, kind: str, name: str, **pod: Any) -> dict[str, Any]:
        """A Deployment or a DaemonSet of polite pods."""
        template = {"metadata": {"labels": {"app": name}}, "spec": self.pod(POLITE, **pod)}
        spec = {"selector": {"matchLabels": {"app": name}}, "template": template}
        return {"apiVersion": "apps/v1", "kind": kind, "metadata": {"name": name}, "spec": spec}

    def apply(self, *objects: dict[str, Any]) -> None:
        for each in objects:
            self.kubectl.apply(each, NAMESPACE)

    def pods(self, app: str, phase: str = "Running") -> list[dict[str, Any]]:
        """The set's pods in this phase that nobody deletes."""
        found = self.kubectl.list("pod", NAMESPACE, f"app={app}")
        return [p for p in found if p["status"].get("phase") == phase and "deletionTimestamp" not in p["metadata"]]

    def wait_for_log(self, pod: str, line: str) -> None:
        wait_for(lambda: line in self.kubectl.log(pod, NAMESPACE).splitlines(), f"{pod} prints {line!r}")

    def evict(self, pod: str) -> subprocess.CompletedProcess[str]:
        body = {"apiVersion": "policy/v1", "kind": "Eviction", "metadata": {"name": pod, "namespace": NAMESPACE}}
        path = f"/api/v1/namespaces/{NAMESPACE}/pods/{pod}/eviction"
        return self.kubectl.run("create", "--raw", path, "-f", "-", stdin=json.dumps(body))

    def start(self, *arguments: str) -> subprocess.Popen[str]:
        command = [find_kubectl(), f"--kubeconfig={self.kubectl.kubeconfig}", *arguments]
        return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)


@pytest.fixture(scope="module", params=["process", pytest.param("podman", marks=pytest.mark.containers)])
def site(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Site]:
    with ExitStack() as stack:
        if request.param == "process":
            cluster, image = request.getfixturevalue("local_cluster"), "none"
        else:
            image = request.getfixturevalue("base_image")
            root: Path = tmp_path_factory.mktemp("drain") / "cluster"
            nodes = ClusterSpec(nodes=[DRAINED], runtime="podman")
            cluster = stack.enter_context(throw_away_cluster(root, nodes))
        kubectl = Kubectl(kubeconfig=cluster.kubeconfig)
        kubectl.create_namespace(NAMESPACE)
        yield Site(kubectl=kubectl, image=image)
        kubectl("uncordon", NODE)
        kubectl.delete("namespace", NAMESPACE)


def is_unschedulable(pod: dict[str, Any]) -> bool:
    conditions = {each["type"]: each.get("reason") for each in pod["status"].get("conditions") or []}
    return conditions.get("PodScheduled") == "Unschedulable"


def test_a_cordoned_node_keeps_its_pods_and_takes_no_others(site: Site) -> None:
    site.apply(site.set_of("Deployment", "cordoned", terminationGracePeriodSeconds=5))
    wait_for(lambda: site.pods("cordoned"), "a pod runs")
    [first] = site.pods("cordoned")

    site.kubectl("cordon", NODE)
    site.kubectl("scale", "-n", NAMESPACE, "deployment/cordoned", "--replicas=2")
    wait_for(lambda: [*filter(is_unschedulable, site.pods("cordoned", "Pending"))], "the second pod finds no node")
    assert [pod["metadata"]["uid"] for pod in site.pods("cordoned")] == [first["metadata"]["uid"]]

    site.kubectl("uncordon", NODE)
    wait_for(lambda: len(site.pods("cordoned")) == 2, "both pods run")
    site.kubectl("delete", "-n", NAMESPACE, "deployment", "cordoned")


def test_a_drain_waits_for_budgets_and_for_the_pods_to_end(site: Site) -> None:
    scratch = {"volumes": [{"name": "scratch", "emptyDir": {}}], "terminationGracePeriodSeconds": 30}
    budget = {"minAvailable": 1, "selector": {"matchLabels": {"app": "web"}}}
    site.apply(
        site.set_of("DaemonSet", "daemon"),
        site.set_of("Deployment", "web", **scratch),
        {"apiVersion": "policy/v1", "kind": "PodDisruptionBudget", "metadata": {"name": "web"}, "spec": budget},
    )
    wait_for(lambda: site.pods("web") and site.pods("daemon"), "the pods run")
    [web], [daemon] = site.pods("web"), site.pods("daemon")
    name = web["metadata"]["name"]
    site.wait_for_log(name, "ready")
    healthy = "jsonpath={.status.currentHealthy}=1"
    site.kubectl("wait", "-n", NAMESPACE, "pdb/web", f"--for={healthy}", "--timeout=30s")

    refused = site.kubectl.run("drain", NODE)
    assert refused.returncode != 0
    assert "cannot delete DaemonSet-managed Pods (use --ignore-daemonsets to ignore)" in refused.stderr
    assert "cannot delete Pods with local storage (use --delete-emptydir-data to override)" in refused.stderr
    evicted = site.evict(name)
    assert "(TooManyRequests): Cannot evict pod as it would violate the pod's disruption budget" in evicted.stderr

    with site.start("logs", "-f", "-n", NAMESPACE, name) as log, site.start(*DRAIN) as drain:
        assert drain.stdout is not None
        assert log.stdout is not None
        assert any("will retry after 5s" in line for line in drain.stdout)
        assert [pod["metadata"]["uid"] for pod in site.pods("web")] == [web["metadata"]["uid"]]
        site.kubectl("patch", "-n", NAMESPACE, "pdb", "web", "--type=merge", "-p", '{"spec":{"minAvailable":0}}')
        assert f"node/{NODE} drained" in drain.stdout.read()
        assert log.stdout.read() == "ready\nending\nended\n"
    assert drain.returncode == 0
    assert [pod["metadata"]["uid"] for pod in site.pods("daemon")] == [daemon["metadata"]["uid"]]
    assert not site.pods("web")

    site.kubectl("uncordon", NODE)
    wait_for(lambda: site.pods("web"), "the pod's successor runs")


def test_an_evicted_pod_has_its_grace_period(site: Site) -> None:
    site.apply(
        {
            "apiVersion": "v1",
            "kind": "Pod",
            "metadata": {"name": "deaf", "labels": {"app": "deaf"}},
            "spec": site.pod(DEAF, terminationGracePeriodSeconds=600),
        }
    )
    wait_for(lambda: site.pods("deaf"), "the pod runs")
    site.wait_for_log("deaf", "ready")
    assert site.evict("deaf").returncode == 0
    site.wait_for_log("deaf", "heard")

    pod = site.kubectl.get("pod", "deaf", NAMESPACE)
    reasons = {each["type"]: each.get("reason") for each in pod["status"]["conditions"]}
    assert reasons["DisruptionTarget"] == "EvictionByEvictionAPI"
    assert pod["metadata"]["deletionGracePeriodSeconds"] == 600
    assert "running" in pod["status"]["containerStatuses"][0]["state"]
    site.kubectl("delete", "-n", NAMESPACE, "pod", "deaf", "--grace-period=1", "--timeout=30s")
