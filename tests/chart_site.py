"""A namespace with the chart's rights and policies, on a real API server."""

from __future__ import annotations

import subprocess
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any
from uuid import uuid4

import pytest
import yaml

from cluster_api import refusal
from cluster_fixtures import Kubectl, wait_for
from minimal_job import MINIMAL
from rendered_objects import objects_in
from spottrain_api.contract.assignments import CapacityType
from spottrain_api.v1alpha1.spec import TrainingJobSpec
from spottrain_local.install import chart_folder, find_helm
from spottrain_operator.objects.control_address import ControlAddress
from spottrain_operator.objects.pods import JobRef, build_pod

Object = dict[str, Any]
# With a policy that most releases don't have.
VALUES: Object = {"karpenter": {"enabled": True}}


def rendered(name: str, values: Object) -> list[Object]:
    """The chart's rights and policies, as the release `name` in its namespace."""
    command = [find_helm(), "template", name, str(chart_folder()), "-n", name, "--values", "-"]
    done = subprocess.run(command, input=yaml.safe_dump(values), capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    groups = ("rbac.authorization.k8s.io/v1", "admissionregistration.k8s.io/v1")
    return [
        each for each in objects_in(done.stdout) if each["apiVersion"] in groups or each["kind"] == "ServiceAccount"
    ]


@dataclass(frozen=True, slots=True, kw_only=True)
class Site:
    """A namespace with the chart's rights and policies, in which jobs may be, too."""

    kubectl: Kubectl
    name: str

    def install(self, values: Object) -> None:
        for each in rendered(self.name, VALUES | values):
            self.kubectl.apply(each, self.name)

    def account(self, part: str) -> str:
        return f"system:serviceaccount:{self.name}:{self.name}-{part}"

    def tries(self, user: str, made: Object) -> str:
        """What the API server says against a new object of this user, which is not kept; empty if it takes it."""
        server = self.kubectl.speaking_for(user)
        return refusal(lambda: server.create(made, self.name, kept=False, fieldValidation="Ignore"))

    def patched(self, user: str, kind: str, name: str, change: Object, *, how: str = "merge") -> str:
        """What the API server says against a change by this user, which is not kept."""
        server = self.kubectl.speaking_for(user)
        return refusal(lambda: server.patch(kind, name, change, self.name, how=how, kept=False))

    def deleted(self, user: str, kind: str, name: str, *, kept: bool = True) -> str:
        """What the API server says against a deletion by this user, which happens if it is `kept`."""
        server = self.kubectl.speaking_for(user)
        return refusal(lambda: server.delete(kind, name, self.name, kept=kept))

    def pod(self, spec: Object | None = None, **changes: Any) -> Object:
        """The pod that the operator would create, with changes of its spec."""
        pod = build_pod(
            JobRef(namespace=self.name, name="job", uid="none"),
            TrainingJobSpec.model_validate(MINIMAL | (spec or {})),
            name="job-1",
            sequence=1,
            capacity_type=CapacityType.SPOT,
            pool=None,
            control=ControlAddress(url="https://control:8443", ca="CA"),
        )
        return pod | {"spec": pod["spec"] | changes}

    def job(self, name: str = "job", **changes: Any) -> Object:
        spec = MINIMAL | changes
        metadata = {"name": name, "namespace": self.name}
        return {"apiVersion": "spottrain.dev/v1alpha1", "kind": "TrainingJob", "metadata": metadata, "spec": spec}


@pytest.fixture(scope="module")
def site(local_cluster: Any) -> Iterator[Site]:
    kubectl = Kubectl(kubeconfig=local_cluster.kubeconfig)
    site = Site(kubectl=kubectl, name=f"policy-{uuid4().hex[:8]}")
    kubectl.create_namespace(site.name)
    try:
        site.install({})
        yield site
    finally:
        objects = yaml.safe_dump_all(rendered(site.name, VALUES))
        kubectl.run("delete", "--wait=false", "--ignore-not-found", "-f", "-", stdin=objects)
        kubectl.delete("namespace", site.name)


def enforced(check: Callable[[], str], refused: bool = True) -> None:
    """Wait until the API server has read a policy, which takes a moment."""
    wait_for(lambda: bool(check()) is refused, "the policy is enforced")
