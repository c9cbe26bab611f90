"""A namespace with the chart's rights and policies, on a real API server."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any
from uuid import uuid4

import pytest
import yaml

from cluster_fixtures import Kubectl, wait_for
from minimal_job import MINIMAL
from spottrain_api import crd
from spottrain_api.contract.assignments import CapacityType
from spottrain_api.v1alpha1.spec import TrainingJobSpec
from spottrain_local.install import chart_folder, find_helm
from spottrain_operator.objects.control_address import ControlAddress
from spottrain_operator.objects.pods import JobRef, build_pod

Object = dict[str, Any]


def rendered(name: str, values: Object) -> list[Object]:
    """The chart's rights and policies, as the release `name` in its namespace."""
    command = [find_helm(), "template", name, str(chart_folder()), "-n", name, "--values", "-"]
    done = subprocess.run(command, input=yaml.safe_dump(values), capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    groups = ("rbac.authorization.k8s.io/v1", "admissionregistration.k8s.io/v1")
    objects = [each for each in yaml.safe_load_all(done.stdout) if each]
    return [each for each in objects if each["apiVersion"] in groups or each["kind"] == "ServiceAccount"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Site:
    """A namespace with the chart's rights and policies, in which jobs may be, too."""

    kubectl: Kubectl
    name: str

    def install(self, values: Object) -> None:
        self.kubectl("apply", "--server-side", "-f", "-", stdin=yaml.safe_dump_all(rendered(self.name, values)))

    def account(self, part: str) -> str:
        return f"system:serviceaccount:{self.name}:{self.name}-{part}"

    def said(self, user: str, *command: str, stdin: Object | None = None) -> str:
        """What kubectl complains about, as this user; empty if it worked."""
        text = json.dumps(stdin) if stdin is not None else None
        done = self.kubectl.run(*command, "-n", self.name, f"--as={user}", stdin=text)
        return "" if done.returncode == 0 else done.stderr

    def tries(self, user: str, made: Object) -> str:
        return self.said(user, "create", "--dry-run=server", "--validate=ignore", "-f", "-", stdin=made)

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
    kubectl("apply", "--server-side", "--force-conflicts", "-f", str(crd.CRDS))
    wait_for(lambda: kubectl.run("get", "tj,tjh").returncode == 0, "the CRDs are served")
    site = Site(kubectl=kubectl, name=f"policy-{uuid4().hex[:8]}")
    kubectl("create", "namespace", site.name)
    try:
        site.install({})
        account = ("get", "serviceaccount", "default", "-n", site.name)
        wait_for(lambda: kubectl.run(*account).returncode == 0, "a service account")
        yield site
    finally:
        objects = yaml.safe_dump_all(rendered(site.name, {}))
        kubectl.run("delete", "--wait=false", "--ignore-not-found", "-f", "-", stdin=objects)
        kubectl.run("delete", "namespace", site.name, "--wait=false")


def enforced(check: Callable[[], str], refused: bool = True) -> None:
    """Wait until the API server has read a policy, which takes a moment."""
    wait_for(lambda: bool(check()) is refused, "the policy is enforced")
