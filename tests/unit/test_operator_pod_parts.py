"""The parts of a pod that a job may choose.

They are resources, memory, containers beside the trainer, zone, mesh and network.
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from minimal_job import MINIMAL
from spottrain_api.contract.assignments import CapacityType
from spottrain_api.contract.names import ENV_CONTROL_DIR
from spottrain_api.v1alpha1.pod_template import Network
from spottrain_api.v1alpha1.spec import TrainingJobSpec
from spottrain_operator.objects.control_address import ControlAddress
from spottrain_operator.objects.pods import JobRef, build_pod
from spottrain_runtime.quantity import parse_quantity

JOB = JobRef(namespace="team", name="gpt", uid="11111111-2222-3333-4444-555555555555")
RESTRICTED = {"allowPrivilegeEscalation": False, "capabilities": {"drop": ["ALL"]}}


def pod(template: dict[str, Any] | None = None, **changes: Any) -> Any:
    spec = TrainingJobSpec.model_validate(MINIMAL | changes | {"podTemplate": template or {}})
    return build_pod(
        JOB,
        spec,
        name="gpt-7",
        sequence=7,
        capacity_type=CapacityType.SPOT,
        pool=None,
        control=ControlAddress(url="https://control:8443", ca="CA"),
    )


def trainer(manifest: Any) -> Any:
    [container] = manifest["spec"]["containers"]
    assert container["name"] == "trainer"
    return container


def containers(manifest: Any) -> list[Any]:
    return [*manifest["spec"].get("initContainers", []), trainer(manifest)]


AMOUNTS = st.fixed_dictionaries(
    {}, optional={"cpu": st.sampled_from(["100m", "2"]), "memory": st.sampled_from(["64Mi", "1Ti"])}
)


@given(requests=AMOUNTS, limits=AMOUNTS, processes=st.integers(1, 8), beside=st.booleans())
def test_each_container_asks_for_cpu_and_memory_and_for_what_its_user_says(
    requests: dict[str, str], limits: dict[str, str], processes: int, beside: bool
) -> None:
    given_amounts = {"requests": requests, "limits": limits}
    if beside:
        manifest = pod({"sidecars": [{"name": "logs", "image": "logs", "resources": given_amounts}]})
        resources = manifest["spec"]["initContainers"][0]["resources"]
    else:
        resources = trainer(pod(resources=given_amounts, processesPerNode=processes))["resources"]
    written = resources.get("requests", {})
    assert resources.get("limits", {}) == limits, "no limit is invented"
    assert requests.items() <= written.items()
    for name in ("cpu", "memory"):
        # Kubernetes takes the limit for the request if there is none.
        assert name in written or name in limits
        if name in limits and name not in requests:
            assert name not in written, "a default above the limit would be refused"
    assert all(parse_quantity(amount) > 0 for amount in written.values())


@pytest.mark.parametrize(
    ("resources", "size", "expected"),
    [
        (None, None, {}),
        ({"limits": {"memory": "64Gi"}}, None, {"sizeLimit": "64Gi"}),
        ({"requests": {"memory": "64Gi"}}, None, {}),
        ({"limits": {"memory": "64Gi"}}, "16Gi", {"sizeLimit": "16Gi"}),
        (None, "16Gi", {"sizeLimit": "16Gi"}),
    ],
    ids=["none", "the memory limit", "a request is no limit", "chosen", "chosen alone"],
)
def test_shared_memory_is_limited(resources: Any, size: str | None, expected: dict[str, str]) -> None:
    manifest = pod({"shmSize": size} if size else {}, resources=resources)
    [memory] = [each for each in manifest["spec"]["volumes"] if each["name"] == "spottrain-shm"]
    assert memory["emptyDir"] == {"medium": "Memory"} | expected


AT_TMP = {"volumes": [{"name": "own", "emptyDir": {}}], "volumeMounts": [{"name": "own", "mountPath": "/tmp"}]}


@pytest.mark.parametrize(
    ("template", "at_tmp"),
    [
        ({}, []),
        ({"readOnlyRootFilesystem": True}, ["spottrain-tmp"]),
        ({"readOnlyRootFilesystem": True, **AT_TMP}, ["own"]),
    ],
    ids=["by default", "read-only", "a volume of the job's own"],
)
def test_a_read_only_image_has_a_folder_of_the_pod_at_tmp(template: dict[str, Any], at_tmp: list[str]) -> None:
    manifest = pod(template)
    container = trainer(manifest)
    expected = RESTRICTED | ({"readOnlyRootFilesystem": True} if template else {})
    assert container["securityContext"] == expected
    assert [mount["name"] for mount in container["volumeMounts"] if mount["mountPath"] == "/tmp"] == at_tmp
    volumes = [each["name"] for each in manifest["spec"]["volumes"]]
    assert [name for name in volumes if name in ("own", "spottrain-tmp")] == at_tmp


BESIDE = {
    "volumes": [{"name": "data", "ephemeral": {"volumeClaimTemplate": {"spec": {}}}}],
    "sidecars": [{"name": "logs", "image": "logs:1", "args": ["--follow"]}],
    "initContainers": [
        {
            "name": "fetch",
            "image": "fetch:1",
            "command": ["fetch", "all"],
            "env": [{"name": "A", "value": "b"}],
            "volumeMounts": [{"name": "data", "mountPath": "/data"}],
        }
    ],
}


def test_sidecars_start_first_and_are_restarted_by_kubernetes() -> None:
    sidecar, init = pod(BESIDE)["spec"]["initContainers"]
    assert (sidecar["name"], sidecar["restartPolicy"], sidecar["args"]) == ("logs", "Always", ["--follow"])
    assert "restartPolicy" not in init, "an init container ends by itself"
    assert (init["name"], init["image"], init["command"]) == ("fetch", "fetch:1", ["fetch", "all"])
    assert init["volumeMounts"] == [{"name": "data", "mountPath": "/data"}]


def test_containers_beside_the_trainer_are_restricted_and_get_no_token() -> None:
    manifest = pod(BESIDE)
    for container in manifest["spec"]["initContainers"]:
        assert container["securityContext"] == RESTRICTED
        assert not {mount["name"] for mount in container.get("volumeMounts", [])} & {"spottrain-token"}
        assert ENV_CONTROL_DIR not in {each["name"] for each in container.get("env", [])}


def test_devices_come_by_claims_of_the_namespace() -> None:
    claims = [
        {"name": "gpus", "resourceClaimTemplateName": "eight-gpus"},
        {"name": "nic", "resourceClaimName": "shared-nic"},
    ]
    manifest = pod({"resourceClaims": claims}, resources={"claims": [{"name": "gpus", "request": "gpu"}]})
    assert manifest["spec"]["resourceClaims"] == claims
    assert trainer(manifest)["resources"] == {
        "claims": [{"name": "gpus", "request": "gpu"}],
        "requests": {"cpu": "1", "memory": "4Gi"},
    }


def test_the_scheduler_is_the_clusters_unless_the_job_says() -> None:
    assert "schedulerName" not in pod()["spec"]
    assert pod({"schedulerName": "gangs"})["spec"]["schedulerName"] == "gangs"


REQUIRED, PREFERRED = (
    "requiredDuringSchedulingIgnoredDuringExecution",
    "preferredDuringSchedulingIgnoredDuringExecution",
)


@pytest.mark.parametrize(
    ("template", "kinds"),
    [
        ({}, {PREFERRED}),
        ({"sameZone": "Preferred"}, {PREFERRED}),
        ({"sameZone": "Required"}, {REQUIRED}),
        ({"sameZone": "Ignored"}, set()),
        ({"sameZone": "Spread"}, set()),
        ({"network": "efa"}, {REQUIRED}),
        ({"network": "tcpx"}, {REQUIRED}),
        ({"network": "infiniband"}, {PREFERRED}),
        ({"network": "efa", "sameZone": "Ignored"}, set()),
    ],
    ids=str,
)
def test_the_pods_of_a_job_go_to_one_zone(template: dict[str, Any], kinds: set[str]) -> None:
    affinity = pod(template)["spec"]["affinity"].get("podAffinity", {})
    assert affinity.keys() == kinds
    for kind, [term] in affinity.items():
        term = term["podAffinityTerm"] if kind == PREFERRED else term
        assert term["topologyKey"] == "topology.kubernetes.io/zone"
        assert term["labelSelector"] == {"matchLabels": {"spottrain.dev/job-uid": JOB.uid}}


def test_the_pods_of_a_job_may_be_spread_over_zones() -> None:
    assert "topologySpreadConstraints" not in pod()["spec"]
    [constraint] = pod({"sameZone": "Spread"})["spec"]["topologySpreadConstraints"]
    assert constraint == {
        "maxSkew": 1,
        "topologyKey": "topology.kubernetes.io/zone",
        "whenUnsatisfiable": "ScheduleAnyway",
        "labelSelector": {"matchLabels": {"spottrain.dev/job-uid": JOB.uid}},
    }


def meshes(manifest: Any) -> dict[str, str]:
    meta = manifest["metadata"]
    known = ("sidecar.istio.io/inject", "istio.io/dataplane-mode", "linkerd.io/inject")
    return {key: value for key, value in {**meta["labels"], **meta["annotations"]}.items() if key in known}


OFF = {"sidecar.istio.io/inject": "false", "istio.io/dataplane-mode": "none", "linkerd.io/inject": "disabled"}


@pytest.mark.parametrize(
    ("template", "changed"),
    [
        ({}, {}),
        ({"labels": {"sidecar.istio.io/inject": "true"}}, {"sidecar.istio.io/inject": "true"}),
        # Istio's label takes precedence over its annotation.
        ({"annotations": {"sidecar.istio.io/inject": "true"}}, {"sidecar.istio.io/inject": "true"}),
        ({"annotations": {"linkerd.io/inject": "enabled"}}, {"linkerd.io/inject": "enabled"}),
    ],
    ids=["off", "label", "annotation", "linkerd"],
)
def test_service_meshes_stay_out_unless_the_template_says(template: Any, changed: dict[str, str]) -> None:
    manifest = pod(template)
    assert meshes(manifest) == OFF | changed
    both = manifest["metadata"]["labels"].keys() & manifest["metadata"]["annotations"].keys()
    assert not both


RIGHTS = {Network.EFA: ["IPC_LOCK"], Network.INFINIBAND: ["IPC_LOCK"], Network.TCPX: None}


@pytest.mark.parametrize("network", Network)
def test_a_network_gives_the_trainer_what_it_needs_and_no_other_container(network: Network) -> None:
    manifest = pod({"network": network.value, **BESIDE})
    # Kubernetes gives capabilities to root alone.
    add = {} if RIGHTS[network] is None else {"add": RIGHTS[network]}
    assert trainer(manifest)["securityContext"] == {
        "runAsUser": 0,
        "runAsNonRoot": False,
        "allowPrivilegeEscalation": False,
        "capabilities": {"drop": ["ALL"], **add},
    }
    users = [each for each in manifest["spec"]["initContainers"] if not each["name"].startswith("spottrain-")]
    assert [each["securityContext"] for each in users] == [RESTRICTED, RESTRICTED]
    assert manifest["spec"]["securityContext"]["runAsNonRoot"] is True
    assert all(each["resources"]["requests"] for each in containers(manifest))
    names = [each["name"] for each in manifest["spec"]["volumes"]]
    assert len(names) == len(set(names))
    assert {m["name"] for each in containers(manifest) for m in each.get("volumeMounts", [])} <= set(names)
    assert "privileged" not in json.dumps(manifest)


@pytest.mark.parametrize("network", [None, Network.EFA, Network.INFINIBAND, Network.TCPX], ids=str)
def test_only_tcpx_sees_anything_of_the_host(network: Network | None) -> None:
    manifest = pod({"network": network.value} if network else {})
    paths = [each["hostPath"]["path"] for each in manifest["spec"]["volumes"] if "hostPath" in each]
    daemons = [each for each in manifest["spec"].get("initContainers", []) if each["name"] == "spottrain-tcpx"]
    if network is Network.TCPX:
        assert paths == ["/home/kubernetes/bin/nvidia/lib64", "/sys", "/proc/sys"]
        assert daemons[0]["securityContext"]["capabilities"] == {"add": ["NET_ADMIN"]}
        assert daemons[0]["restartPolicy"] == "Always"
        # The trainer sees the libraries alone.
        mounts = {mount["name"]: mount for mount in trainer(manifest)["volumeMounts"]}
        assert mounts["spottrain-nvidia"]["readOnly"] is True
        assert not mounts.keys() & {"spottrain-sys", "spottrain-proc-sys"}
    else:
        assert (paths, daemons) == ([], [])


def env(manifest: Any) -> dict[str, str]:
    named = [each["name"] for each in trainer(manifest)["env"]]
    assert len(named) == len(set(named))
    return {each["name"]: each.get("value", "") for each in trainer(manifest)["env"]}


def documented(network: Network) -> dict[str, str]:
    """The variables of a preset in the docs: in its row, or in a list of its own."""
    page = (Path(__file__).parents[2] / "docs" / "how-to" / "pods.md").read_text()
    row, own = rf"^\| `{network}` \|.*", rf"^### Variables of {network.upper()}\n.*?^```$"
    text = "\n".join(re.findall(rf"{row}|(?s:{own})", page, re.MULTILINE))
    return dict(re.findall(r"(?:`|^)([A-Z][A-Z0-9_]+)=([^`\n]+)", text, re.MULTILINE))


@pytest.mark.parametrize(
    ("network", "num_variables"), [(Network.EFA, 4), (Network.INFINIBAND, 1), (Network.TCPX, 20)]
)
def test_the_environment_of_a_network_is_the_documented_one(network: Network, num_variables: int) -> None:
    added = dict(env(pod({"network": network.value})).items() - env(pod()).items())
    assert added == documented(network)
    assert len(added) == num_variables


@pytest.mark.parametrize(
    ("network", "name", "value"),
    [
        (Network.EFA, "FI_PROVIDER", "efa"),
        (Network.INFINIBAND, "NCCL_NET", "IB"),
        (Network.TCPX, "NCCL_GPUDIRECTTCPX_CTRL_DEV", "eth0"),
    ],
)
def test_the_users_environment_takes_precedence_over_the_networks(network: Network, name: str, value: str) -> None:
    assert env(pod({"network": network.value}))[name] == value
    assert env(pod({"network": network.value}, env=[{"name": name, "value": "mine"}]))[name] == "mine"
    assert name not in env(pod())
