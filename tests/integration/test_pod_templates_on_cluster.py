"""Pod templates on a real API server.

Bad templates are refused with a sentence, and no pod gets rights by one.

What no rule refuses becomes a pod in a namespace that enforces the level `restricted`. There it is accepted, or
refused with Kubernetes' own sentence, which the job's condition PodsHealthy quotes.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any
from uuid import uuid4

import pytest

import hostile_specs
from cluster_api import refusal
from cluster_fixtures import Kubectl, wait_for
from hostile_pod_templates import GOOD, HARMLESS, REFUSED, template
from minimal_job import MINIMAL
from spottrain_api.contract.assignments import CapacityType
from spottrain_api.v1alpha1.spec import TrainingJobSpec
from spottrain_operator.objects.control_address import ControlAddress
from spottrain_operator.objects.pods import JobRef, build_pod

pytestmark = pytest.mark.cluster

ENFORCE = "pod-security.kubernetes.io/enforce"
PRIVILEGED = {
    "apiVersion": "v1",
    "kind": "Pod",
    "metadata": {"name": "privileged"},
    "spec": {"hostNetwork": True, "containers": [{"name": "one", "image": "none"}]},
}


@dataclass(frozen=True)
class Namespace:
    """A namespace that enforces the level `restricted`."""

    kubectl: Kubectl
    name: str

    def create(self, manifest: dict[str, Any], *, kept: bool = True, **query: str) -> str:
        """What the API server says against an object; empty if it takes it."""
        return refusal(lambda: self.kubectl.create(manifest, self.name, kept=kept, **query))

    def enforce(self, level: str) -> None:
        """Let it enforce a level. Admission knows namespaces from a cache, and follows a moment later."""
        self.kubectl.patch("namespace", self.name, {"metadata": {"labels": {ENFORCE: level}}})
        sentence = "" if level == "privileged" else f'violates PodSecurity "{level}:latest"'
        wait_for(lambda: self._says_of_privileges(sentence), f"level {level} is enforced")

    def _says_of_privileges(self, sentence: str) -> bool:
        said = self.create(PRIVILEGED, kept=False)
        return sentence in said if sentence else not said

    def create_pod(self, spec: dict[str, Any]) -> dict[str, Any]:
        """The pod of a job as the API server makes it.

        Kubernetes deletes it soon, as there is no such job.
        """
        pod: dict[str, Any] = self.kubectl.create(self.pod(spec), self.name)
        return pod

    def try_job(self, spec: dict[str, Any]) -> str:
        metadata = {"name": "job"}
        job = {"apiVersion": "spottrain.dev/v1alpha1", "kind": "TrainingJob", "metadata": metadata, "spec": spec}
        return self.create(job, kept=False)

    def pod(self, spec: dict[str, Any], *, uid: str = "none", name: str = "job-1") -> dict[str, Any]:
        """The pod that the operator would create for a job."""
        return build_pod(
            JobRef(namespace=self.name, name="job", uid=uid),
            TrainingJobSpec.model_validate(spec),
            name=name,
            sequence=1,
            capacity_type=CapacityType.SPOT,
            pool=None,
            control=ControlAddress(url="https://control:8443", ca="CA"),
        )


@pytest.fixture(scope="module")
def namespace(local_cluster: Any) -> Iterator[Namespace]:
    kubectl = Kubectl(kubeconfig=local_cluster.kubeconfig)
    name = f"pods-{uuid4().hex[:8]}"
    kubectl.create_namespace(name, {ENFORCE: "restricted"})
    found = Namespace(kubectl=kubectl, name=name)
    assert found.try_job(MINIMAL) == "", "a good job is accepted"
    yield found
    kubectl.delete("namespace", name)


@pytest.mark.parametrize("case", REFUSED)
def test_a_bad_pod_template_is_refused_with_a_sentence(namespace: Namespace, case: str) -> None:
    changes, sentence = REFUSED[case]
    said = namespace.try_job(MINIMAL | changes)
    assert sentence in said


@pytest.mark.parametrize("case", hostile_specs.REFUSED)
def test_a_bad_spec_is_refused_with_a_sentence(namespace: Namespace, case: str) -> None:
    changes, sentence = hostile_specs.REFUSED[case]
    assert sentence in namespace.try_job(MINIMAL | changes)


@pytest.mark.parametrize("case", hostile_specs.SHOWN)
def test_the_api_server_accepts_what_is_shown_as_text(namespace: Namespace, case: str) -> None:
    text = hostile_specs.SHOWN[case]
    uri = f"s3://bucket/{text.replace('#', '')}"  # which no URI may have
    said = namespace.try_job(MINIMAL | hostile_specs.uri(uri) | hostile_specs.script(script=text))
    assert said == ""


@pytest.mark.parametrize("case", HARMLESS)
def test_what_no_rule_refuses_gives_a_restricted_pod_or_none(namespace: Namespace, case: str) -> None:
    changes, sentence = HARMLESS[case]
    assert namespace.try_job(MINIMAL | changes) == ""
    pod = namespace.pod(MINIMAL | changes)
    assert not [volume for volume in pod["spec"]["volumes"] if "hostPath" in volume]
    # The operator's client leaves it to the server to drop what a pod doesn't have.
    said = namespace.create(pod, kept=False, fieldValidation="Ignore")
    assert (said == "") if sentence is None else (sentence in said), said


NETWORKS = {
    "efa": {"limits": {"vpc.amazonaws.com/efa": "4"}},
    "infiniband": {"limits": {"rdma/hca_shared_devices_a": "1"}},
    "tcpx": {"limits": {"nvidia.com/gpu": "8"}},
}


@pytest.mark.parametrize("network", NETWORKS)
def test_pods_of_a_network_need_a_privileged_namespace(namespace: Namespace, network: str) -> None:
    spec = MINIMAL | template(network=network) | {"resources": NETWORKS[network]}
    assert namespace.try_job(spec) == ""
    for level in ("restricted", "baseline"):
        namespace.enforce(level)
        assert f'violates PodSecurity "{level}:latest"' in namespace.create(namespace.pod(spec), kept=False)
    namespace.enforce("privileged")
    assert namespace.create(namespace.pod(spec), kept=False) == ""
    namespace.enforce("restricted")


QUOTA = {
    "apiVersion": "v1",
    "kind": "ResourceQuota",
    "metadata": {"name": "team"},
    "spec": {"hard": {"requests.cpu": "40", "requests.memory": "200Gi"}},
}
ALL_OF_QUOTA = {"requests.cpu": "40", "requests.memory": "200Gi", "limits.cpu": "160", "limits.memory": "800Gi"}
RANGE = {
    "apiVersion": "v1",
    "kind": "LimitRange",
    "metadata": {"name": "team"},
    "spec": {"limits": [{"type": "Container", "default": {"cpu": "8", "memory": "64Gi"}}]},
}
BESIDE = template(schedulerName="nobody", sidecars=[GOOD], initContainers=[{"name": "fetch", "image": "fetch"}])


@pytest.fixture
def team(namespace: Namespace) -> Iterator[Namespace]:
    name = f"team-{uuid4().hex[:8]}"
    namespace.kubectl.create_namespace(name)
    yield Namespace(kubectl=namespace.kubectl, name=name)
    namespace.kubectl.delete("namespace", name)


def enforced(team: Namespace) -> bool:
    """Whether Kubernetes has counted what the quota limits."""
    return "hard" in team.kubectl.get("resourcequota", "team", team.name)["status"]


@pytest.mark.parametrize(
    "changes",
    [
        BESIDE,
        BESIDE | {"resources": {"limits": {"nvidia.com/gpu": "8"}}},
        BESIDE | {"resources": {"limits": {"memory": "1Gi"}}},
        BESIDE | {"processesPerNode": 8, "batch": {"global": 32}},
    ],
    ids=["no resources", "GPUs alone", "less than the defaults", "eight processes"],
)
def test_pods_pass_a_quota_that_demands_requests(team: Namespace, changes: dict[str, Any]) -> None:
    assert team.create(QUOTA) == ""
    wait_for(lambda: enforced(team), "the quota is enforced")
    pod = team.create_pod(MINIMAL | changes)
    assert pod["status"]["qosClass"] == "Burstable"
    assert pod["spec"]["schedulerName"] == "nobody"


def test_pods_pass_a_quota_that_demands_limits_with_a_limit_range(team: Namespace) -> None:
    assert team.create(QUOTA | {"spec": {"hard": ALL_OF_QUOTA}}) == ""
    wait_for(lambda: enforced(team), "the quota is enforced")
    said = team.create(team.pod(MINIMAL | BESIDE))
    assert "must specify limits.cpu" in said, "no limit is invented"
    assert team.create(RANGE) == ""
    pod = team.pod(MINIMAL | BESIDE)
    wait_for(lambda: team.create(pod, kept=False) == "", "the limits of the range are known")
    [trainer] = team.create_pod(MINIMAL | BESIDE)["spec"]["containers"]
    assert trainer["resources"]["requests"] == {"nvidia.com/gpu": "1", "cpu": "1", "memory": "4Gi"}
    assert trainer["resources"]["limits"] == {"nvidia.com/gpu": "1", "cpu": "8", "memory": "64Gi"}


ZONE = "topology.kubernetes.io/zone"
ROOM = {"cpu": "8", "memory": "32Gi", "pods": "10"}


def node(name: str, zone: str, pool: str) -> dict[str, Any]:
    """A node that no kubelet serves."""
    labels = {"pool": pool, ZONE: zone, "kubernetes.io/hostname": name}
    status = {"allocatable": ROOM, "capacity": ROOM}
    return {"apiVersion": "v1", "kind": "Node", "metadata": {"name": name, "labels": labels}, "status": status}


@pytest.fixture
def zones(team: Namespace) -> Iterator[Namespace]:
    """A namespace with two nodes in each of the zones a and b.

    The label `pool` of the nodes is the name of the namespace.
    """
    names = {f"{team.name}-{number}": zone for number, zone in enumerate("aabb")}
    for name, zone in names.items():
        assert team.create(node(name, zone, team.name)) == ""
    yield team
    team.kubectl.delete_all("pod", team.name, grace_seconds=0)
    for name in names:
        team.kubectl.delete("node", name)


@pytest.mark.parametrize(
    ("changes", "third"), [({}, "b"), ({"sameZone": "Required"}, "waits")], ids=["Preferred", "Required"]
)
def test_the_scheduler_keeps_the_pods_of_a_job_in_one_zone(
    zones: Namespace, changes: dict[str, str], third: str
) -> None:
    pool = {"name": "own", "capacityType": "spot", "provider": "custom", "nodeSelector": {"pool": zones.name}}
    spec = MINIMAL | {"capacity": {"pools": [pool]}, "resources": {"limits": {"cpu": "1"}}}
    uid = str(uuid4())

    def zone_of(number: int, **more: Any) -> str:
        """Where the scheduler puts the next pod of the job."""
        parts = {"tolerations": [{"operator": "Exists"}], **changes, **more}
        pod = zones.pod(spec | template(**parts), uid=uid, name=f"job-{number}")
        del pod["metadata"]["ownerReferences"]  # there is no such job
        assert zones.create(pod) == ""

        def found() -> str:
            made = zones.kubectl.get("pod", f"job-{number}", zones.name)
            if name := made["spec"].get("nodeName"):
                return str(zones.kubectl.get("node", name)["metadata"]["labels"][ZONE])
            said = [each.get("message", "") for each in made["status"].get("conditions", [])]
            return "waits" if any("didn't match pod affinity rules" in each for each in said) else ""

        wait_for(found, f"pod {number} is placed, or waits")
        return found()

    assert [zone_of(1, nodeSelector={ZONE: "a"}), zone_of(2), zone_of(3)] == ["a", "a", third]
