"""The chart's RBAC on a real API server: accepted, sufficient, and minimal."""

from __future__ import annotations

import subprocess
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from uuid import uuid4

import pytest
import yaml

from cluster_fixtures import Kubectl, wait_for
from rendered_objects import objects_in
from spottrain_local.install import find_helm

pytestmark = pytest.mark.cluster

CHART = Path(__file__).parents[2] / "charts" / "spottrain"
PRESETS = {path.name: yaml.safe_load(path.read_text()) for path in CHART.glob("values.*.yaml")}
FURTHER_VALUES: dict[str, dict[str, Any]] = {
    "eks": {
        "nodeSelector": {"eks.amazonaws.com/capacityType": "ON_DEMAND"},
        "image": {"repository": "111122223333.dkr.ecr.us-east-1.amazonaws.com/spottrain", "tag": "0.1.0"},
        "imagePullSecrets": [{"name": "registry"}],
    },
    "gke": {
        "watcher": {"priorityClassName": "system-node-critical", "env": [{"name": "A", "value": "b"}]},
        "serviceAccount": {"annotations": {"iam.gke.io/gcp-service-account": "x@y.iam.gserviceaccount.com"}},
        "dashboard": {"enabled": True, "annotations": {"grafana_folder": "training"}},
    },
    "aks": {
        "tolerations": [{"key": "CriticalAddonsOnly", "operator": "Exists"}],
        "affinity": {"nodeAffinity": {}},
        "operator": {"replicas": 2, "podAnnotations": {"a": "b"}, "priorityClassName": "system-cluster-critical"},
    },
}
VALUES = PRESETS | {"defaults": {}, "no-watcher": {"watcher": {"enabled": False}}} | FURTHER_VALUES


@dataclass(frozen=True, slots=True, kw_only=True)
class Release:
    """A name and a namespace to install the chart under."""

    name: str
    kubectl: Kubectl

    def render(self, values: dict[str, Any]) -> list[dict[str, Any]]:
        command = [find_helm(), "template", self.name, str(CHART), "-n", self.name, "--values", "-"]
        done = subprocess.run(command, input=yaml.safe_dump(values), capture_output=True, text=True, timeout=60)
        assert done.returncode == 0, done.stderr
        return objects_in(done.stdout)

    def try_out(self, objects: list[dict[str, Any]]) -> str:
        """Have the API server check the objects without keeping them; what it warns of."""
        options = ("apply", "--server-side", "--dry-run=server", "-f", "-")
        done = self.kubectl.run(*options, stdin=yaml.safe_dump_all(objects))
        assert done.returncode == 0, done.stderr
        return done.stderr

    def account(self, part: str) -> str:
        return f"system:serviceaccount:{self.name}:{self.name}-{part}"

    def can(self, account: str, question: str) -> bool:
        """Whether `account` may do "verb resource[.group][/name] [--subresource=…] [-n namespace] [-A]".

        The questions are those of `kubectl auth can-i`.
        """
        review = {
            "apiVersion": "authorization.k8s.io/v1",
            "kind": "SelfSubjectAccessReview",
            "spec": {"resourceAttributes": asked(question)},
        }
        answer = self.kubectl.speaking_for(self.account(account)).create(review)
        return bool(answer["status"]["allowed"])


def asked(question: str) -> dict[str, str]:
    """What the API server is asked, as kubectl asks it."""
    words = iter(question.split())
    attributes, what = {"verb": next(words), "namespace": "default"}, next(words)
    for word in words:
        match word.partition("="):
            case ("-A", _, _):
                attributes["namespace"] = ""
            case ("-n", _, _):
                attributes["namespace"] = next(words)
            case ("--subresource", _, subresource):
                attributes["subresource"] = subresource
            case _:
                raise ValueError(f"{word} is not understood in {question!r}")
    resource, _, attributes["name"] = what.partition("/")
    attributes["resource"], _, attributes["group"] = resource.partition(".")
    return attributes


@pytest.fixture(scope="module")
def release(local_cluster: Any) -> Iterator[Release]:
    kubectl = Kubectl(kubeconfig=local_cluster.kubeconfig)
    name = f"chart-{uuid4().hex[:8]}"
    release = Release(name=name, kubectl=kubectl)
    kubectl.create_namespace(name, {"pod-security.kubernetes.io/warn": "restricted"})
    rights = [each for each in release.render({}) if "rbac" in each["apiVersion"] or each["kind"] == "ServiceAccount"]
    try:
        for each in rights:
            kubectl.apply(each, name)
        yield release
    finally:
        kubectl.run("delete", "--wait=false", "-f", "-", stdin=yaml.safe_dump_all(rights))
        kubectl.delete("namespace", name)


@pytest.mark.parametrize("name", VALUES)
def test_the_api_server_accepts_every_object(release: Release, name: str) -> None:
    objects = release.render(VALUES[name])
    assert ("DaemonSet" in {each["kind"] for each in objects}) is (name != "no-watcher")
    for each in objects:
        release.kubectl.apply(each, release.name, kept=False)


def test_the_operator_is_restricted_and_the_watcher_is_but_for_the_host_network(release: Release) -> None:
    objects = {each["kind"]: each for each in release.render({})}
    assert "would violate" not in release.try_out([objects["Deployment"]])
    [warning] = [line for line in release.try_out([objects["DaemonSet"]]).splitlines() if "would violate" in line]
    assert warning.endswith('would violate PodSecurity "restricted:latest": host namespaces (hostNetwork=true)')


@pytest.mark.parametrize(
    "question",
    [
        "list trainingjobs.spottrain.dev -A",
        "watch trainingjobs.spottrain.dev -A",
        "update trainingjobs.spottrain.dev --subresource=status -n default",
        "delete trainingjobs.spottrain.dev -n default",
        "create pods -n default",
        "delete pods -n default",
        "patch pods -n default",
        "watch pods -A",
        "get nodes",
        "create events -n default",
        "update trainingjobhistories.spottrain.dev -n default",
        "delete trainingjobcosts.spottrain.dev -n default",
        "get trainingprofiles.spottrain.dev",
        "create tokenreviews.authentication.k8s.io",
    ],
)
def test_the_operator_may_do_its_work(release: Release, question: str) -> None:
    assert release.can("operator", question)


def test_the_operator_may_renew_its_lease_alone(release: Release) -> None:
    assert release.can("operator", f"update leases.coordination.k8s.io/spottrain-operator -n {release.name}")
    assert not release.can("operator", f"update leases.coordination.k8s.io/another -n {release.name}")
    assert not release.can("operator", "update leases.coordination.k8s.io/spottrain-operator -n kube-system")


def test_the_operator_may_write_in_the_namespaces_of_a_list_alone(release: Release) -> None:
    """The roles are those of `release`.

    A binding in one namespace takes the place of that for all.
    """
    team = f"{release.name}-team"
    release.kubectl.create_namespace(team)
    of_all = [each for each in release.render({}) if each["metadata"]["name"] == f"{release.name}-operator-jobs"]
    values = {"watchNamespaces": {"names": [team]}}
    [of_one] = [each for each in release.render(values) if each["metadata"].get("namespace") == team]
    [binding] = [each for each in of_all if each["kind"] == "ClusterRoleBinding"]
    try:
        release.kubectl.delete(binding["kind"], binding["metadata"]["name"])
        release.kubectl.apply(of_one)
        for verb in (
            "create pods",
            "delete pods",
            "patch pods",
            "create events",
            "delete trainingjobs.spottrain.dev",
        ):
            wait_for(lambda verb=verb: release.can("operator", f"{verb} -n {team}"), f"{verb} is allowed")  # type: ignore[misc]
            wait_for(lambda verb=verb: not release.can("operator", f"{verb} -n default"), f"{verb} is not")  # type: ignore[misc]
        assert release.can("operator", f"patch pods -n {release.name}"), "its own, for the label of the leader"
        assert not release.can("operator", f"create pods -n {release.name}")
    finally:
        release.kubectl.delete("namespace", team)
        release.kubectl.apply(binding)


def test_the_operator_may_read_and_write_the_control_apis_secret_alone(release: Release) -> None:
    for verb in ("get", "update"):
        assert release.can("operator", f"{verb} secrets/spottrain-control-tls -n {release.name}")
        assert not release.can("operator", f"{verb} secrets/another -n {release.name}")
        assert not release.can("operator", f"{verb} secrets/spottrain-control-tls -n kube-system")
        assert not release.can("watcher", f"{verb} secrets/spottrain-control-tls -n {release.name}")
    for verb in ("create", "list", "watch", "delete"):
        assert not release.can("operator", f"{verb} secrets -n {release.name}")


@pytest.mark.parametrize("question", ["get nodes", "patch nodes", "watch nodes", "list pods -A"])
def test_the_watcher_may_do_its_work(release: Release, question: str) -> None:
    assert release.can("watcher", question)


@pytest.mark.parametrize("account", ["operator", "watcher"])
@pytest.mark.parametrize(
    "question",
    [
        "get secrets -n default",
        "create pods --subresource=exec -n default",
        "get nodes --subresource=proxy",
        "delete nodes",
        "create serviceaccounts --subresource=token -n default",
        "create pods --subresource=eviction -n default",
        "update pods -n default",
        "get configmaps -n default",
        "create configmaps -n default",
        "update configmaps -n default",
        "create deployments.apps -n default",
        "create clusterrolebindings.rbac.authorization.k8s.io",
        "bind clusterroles.rbac.authorization.k8s.io",
        "escalate clusterroles.rbac.authorization.k8s.io",
        "impersonate users",
        "create trainingjobs.spottrain.dev -n default",
        "patch customresourcedefinitions.apiextensions.k8s.io",
    ],
)
def test_neither_may_do_more(release: Release, account: str, question: str) -> None:
    assert not release.can(account, question)


@pytest.mark.parametrize("question", ["patch nodes", "create nodes"])
def test_the_operator_leaves_nodes_alone(release: Release, question: str) -> None:
    assert not release.can("operator", question)


@pytest.mark.parametrize("question", ["create pods -n default", "patch pods -n default", "create events -n default"])
def test_the_watcher_decides_nothing(release: Release, question: str) -> None:
    assert not release.can("watcher", question)
