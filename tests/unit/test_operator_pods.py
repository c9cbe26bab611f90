"""The pod manifest: what must hold for every job, checked over many jobs."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from spottrain_api.contract.assignments import CapacityType
from spottrain_api.contract.names import (
    ENV_CONTROL_DIR,
    ENV_GPUS,
    ENV_POD_UID,
    ENV_WATCHER_PORT,
    LABEL_CAPACITY_TYPE,
    LABEL_JOB_UID,
)
from spottrain_api.contract.nodes import SPOT_LABELS
from spottrain_api.v1alpha1.capacity import PoolProvider
from spottrain_api.v1alpha1.spec import TrainingJobSpec
from spottrain_operator.objects.control_address import ControlAddress
from spottrain_operator.objects.placement import DEFAULT_SITE, Site
from spottrain_operator.objects.pods import OWN_IDS, JobRef, build_pod, template_hash
from spottrain_runtime.logs import ENV_LOG_FORMAT, LogFormat

JOB = JobRef(namespace="team", name="gpt", uid="11111111-2222-3333-4444-555555555555")
MINIMAL: dict[str, Any] = {
    "image": "registry.example/train:1",
    "entrypoint": {"script": "/app/train.py"},
    "nodes": {"min": 2, "max": 4},
    "batch": {"global": 64},
    "checkpoint": {"uri": "s3://bucket/prefix"},
}


def spec(**changes: Any) -> TrainingJobSpec:
    return TrainingJobSpec.model_validate(MINIMAL | changes)


def pod(
    job_spec: TrainingJobSpec,
    capacity: CapacityType = CapacityType.SPOT,
    pool: str | None = None,
    avoided: tuple[str, ...] = (),
    site: Site = DEFAULT_SITE,
) -> Any:
    return build_pod(
        JOB,
        job_spec,
        name="gpt-7",
        sequence=7,
        capacity_type=capacity,
        pool=pool,
        avoided=avoided,
        control=ControlAddress(url="https://control:8443", ca="CA"),
        site=site,
    )


def env_of(manifest: Any) -> dict[str, Any]:
    return {each["name"]: each for each in manifest["spec"]["containers"][0]["env"]}


@pytest.mark.parametrize(("assigns_ids", "ids"), [(False, OWN_IDS), (True, {})])
def test_a_cluster_that_assigns_ids_finds_none_in_the_pod(assigns_ids: bool, ids: dict[str, int]) -> None:
    manifest = pod(spec(), CapacityType.SPOT, site=Site(assigns_ids=assigns_ids))
    security = manifest["spec"]["securityContext"]
    assert security == {"runAsNonRoot": True, "seccompProfile": {"type": "RuntimeDefault"}} | ids


@given(
    processes=st.integers(1, 8),
    capacity=st.sampled_from(CapacityType),
    labels=st.dictionaries(st.sampled_from(["team", LABEL_JOB_UID, LABEL_CAPACITY_TYPE]), st.just("mine")),
    grace=st.integers(1, 3600),
)
def test_every_pod_is_restricted_and_carries_the_operators_labels(
    processes: int, capacity: CapacityType, labels: dict[str, str], grace: int
) -> None:
    template = {"labels": labels, "terminationGracePeriodSeconds": grace}
    manifest = pod(spec(processesPerNode=processes, podTemplate=template), capacity)
    pod_spec = manifest["spec"]
    container = pod_spec["containers"][0]
    assert pod_spec["securityContext"]["runAsNonRoot"] is True
    assert pod_spec["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}
    assert container["securityContext"] == {"allowPrivilegeEscalation": False, "capabilities": {"drop": ["ALL"]}}
    assert not {"hostNetwork", "hostPID", "hostIPC"} & pod_spec.keys()
    assert pod_spec["automountServiceAccountToken"] is False
    assert pod_spec["restartPolicy"] == "Never"
    assert pod_spec["terminationGracePeriodSeconds"] == grace
    assert container["resources"] == {
        "limits": {"nvidia.com/gpu": str(processes)},
        "requests": {"cpu": str(processes), "memory": f"{4 * processes}Gi"},
    }
    assert manifest["metadata"]["labels"][LABEL_JOB_UID] == JOB.uid
    assert manifest["metadata"]["labels"][LABEL_CAPACITY_TYPE] == capacity.value
    assert manifest["metadata"]["ownerReferences"][0]["uid"] == JOB.uid


def test_the_only_credential_is_a_token_for_the_operator() -> None:
    manifest = pod(spec())
    projected = [each for each in manifest["spec"]["volumes"] if "projected" in each]
    [token, address] = projected[0]["projected"]["sources"]
    assert token["serviceAccountToken"]["audience"] == "spottrain"
    assert list(address) == ["downwardAPI"]


@pytest.mark.parametrize(
    ("template", "policy"), [({}, None), ({"imagePullPolicy": "Always"}, "Always")], ids=["cluster", "job"]
)
def test_when_the_image_is_pulled_is_left_to_the_cluster_unless_the_job_says(
    template: dict[str, Any], policy: str | None
) -> None:
    manifest = pod(spec(podTemplate=template))
    assert manifest["spec"]["containers"][0].get("imagePullPolicy") == policy


def test_users_variables_come_before_the_operators_and_replace_the_defaults() -> None:
    secret = {"name": "TOKEN", "valueFrom": {"secretKeyRef": {"name": "hub", "key": "token"}}}
    manifest = pod(spec(env=[{"name": "HOME", "value": "/home/me"}, secret]))
    names = [each["name"] for each in manifest["spec"]["containers"][0]["env"]]
    assert len(names) == len(set(names))
    assert names.index("TOKEN") < names.index(ENV_CONTROL_DIR)
    env = env_of(manifest)
    assert env["HOME"]["value"] == "/home/me"
    assert env["TOKEN"] == secret
    assert env[ENV_POD_UID]["valueFrom"] == {"fieldRef": {"fieldPath": "metadata.uid"}}


def terms(manifest: Any) -> list[Any]:
    required = manifest["spec"]["affinity"]["nodeAffinity"]["requiredDuringSchedulingIgnoredDuringExecution"]
    return [term["matchExpressions"] for term in required["nodeSelectorTerms"]]


def matches(term: list[Any], labels: dict[str, str]) -> bool:
    def one(expression: Any) -> bool:
        value = labels.get(expression["key"])
        match expression["operator"]:
            case "In":
                return value in expression["values"]
            case "NotIn":
                return value not in expression["values"]
            case "Exists":
                return value is not None
        raise AssertionError(expression)

    return all(one(expression) for expression in term)


SPOT_NODES = {
    "eks": {"eks.amazonaws.com/capacityType": "SPOT"},
    "karpenter": {"karpenter.sh/capacity-type": "spot"},
    "gke": {"cloud.google.com/gke-nodepool": "a", "cloud.google.com/gke-spot": "true"},
    "gke-preemptible": {"cloud.google.com/gke-nodepool": "a", "cloud.google.com/gke-preemptible": "true"},
    "aks": {"kubernetes.azure.com/agentpool": "a", "kubernetes.azure.com/scalesetpriority": "spot"},
    "oke": {"oci.oraclecloud.com/fault-domain": "FAULT-DOMAIN-1", "oci.oraclecloud.com/oke-is-preemptible": "true"},
    "together": {"together.ai/compute-class": "preemptible"},
}
ON_DEMAND_NODES = {
    "eks": {"eks.amazonaws.com/capacityType": "ON_DEMAND"},
    "karpenter": {"karpenter.sh/capacity-type": "on-demand"},
    "karpenter-reserved": {"karpenter.sh/capacity-type": "reserved"},
    "gke": {"cloud.google.com/gke-nodepool": "a"},
    "aks": {"kubernetes.azure.com/agentpool": "a"},
    "oke": {"oci.oraclecloud.com/fault-domain": "FAULT-DOMAIN-1"},
}


@pytest.mark.parametrize("provider", SPOT_NODES)
def test_spot_nodes_take_spot_pods_only(provider: str) -> None:
    labels = SPOT_NODES[provider]
    assert any(matches(term, labels) for term in terms(pod(spec(), CapacityType.SPOT)))
    assert not any(matches(term, labels) for term in terms(pod(spec(), CapacityType.ON_DEMAND)))


@pytest.mark.parametrize("provider", ON_DEMAND_NODES)
def test_on_demand_nodes_take_on_demand_pods_only(provider: str) -> None:
    labels = ON_DEMAND_NODES[provider]
    assert any(matches(term, labels) for term in terms(pod(spec(), CapacityType.ON_DEMAND)))
    assert not any(matches(term, labels) for term in terms(pod(spec(), CapacityType.SPOT)))


def test_every_known_label_of_spot_nodes_is_a_term_and_a_toleration() -> None:
    manifest = pod(spec(), CapacityType.SPOT)
    of_templates = [("capacityType", "SPOT")]
    found = sorted((each["key"], *each["values"]) for [each] in terms(manifest))
    assert found == sorted([*SPOT_LABELS.items(), *of_templates])
    tolerated = {each["key"] for each in manifest["spec"]["tolerations"]}
    assert tolerated == {*SPOT_LABELS, "nvidia.com/gpu"}
    assert {each["key"] for each in pod(spec(), CapacityType.ON_DEMAND)["spec"]["tolerations"]} == {"nvidia.com/gpu"}


@pytest.mark.parametrize("provider", [each.value for each in PoolProvider if each is not PoolProvider.CUSTOM])
@pytest.mark.parametrize("capacity", CapacityType)
def test_every_provider_has_its_labels(provider: str, capacity: CapacityType) -> None:
    pools = [{"name": "a", "capacityType": capacity.value, "provider": provider}]
    assert all(term for term in terms(pod(spec(capacity={"pools": pools}), capacity)))


def test_together_marks_no_standard_node_so_only_a_pool_takes_one() -> None:
    pools = [{"name": "a", "capacityType": "on-demand", "provider": "together"}]
    [term] = terms(pod(spec(capacity={"pools": pools}), CapacityType.ON_DEMAND))
    assert matches(term, {})
    assert not matches(term, SPOT_NODES["together"])
    assert not any(matches(each, {}) for each in terms(pod(spec(), CapacityType.ON_DEMAND)))


def test_a_pool_may_name_a_compute_class_of_gke_whose_taint_its_pods_tolerate() -> None:
    label = "cloud.google.com/compute-class"
    pools = [
        {"name": kind, "capacityType": kind, "provider": "gke", "nodeSelector": {label: f"l4-{kind}"}}
        for kind in ("spot", "on-demand")
    ]
    nodes = {
        kind: labels["gke"] | {label: f"l4-{kind}"}
        for kind, labels in (("spot", SPOT_NODES), ("on-demand", ON_DEMAND_NODES))
    }
    for kind in CapacityType:
        manifest = pod(spec(capacity={"pools": pools}), kind)
        fitting = [each for each, labels in nodes.items() if any(matches(term, labels) for term in terms(manifest))]
        assert fitting == [kind.value]
        taint = {"key": label, "operator": "Equal", "value": f"l4-{kind.value}", "effect": "NoSchedule"}
        assert [each for each in manifest["spec"]["tolerations"] if each["key"] == label] == [taint]


SITE = Site(spot_labels={"example.com/capacity": "spot"}, watcher_port=9999, log_format=LogFormat.JSON)


@pytest.mark.parametrize("capacity", CapacityType)
def test_a_site_has_its_own_spot_labels_port_and_form_of_logs(capacity: CapacityType) -> None:
    name: dict[str, Any] = {"name": "gpt-7", "sequence": 7, "capacity_type": capacity, "pool": None}
    manifest = build_pod(JOB, spec(), control=ControlAddress(url="https://control:8443", ca="CA"), site=SITE, **name)
    spot = capacity is CapacityType.SPOT
    assert any(matches(term, {"example.com/capacity": "spot"}) for term in terms(manifest)) is spot
    gke = {"cloud.google.com/gke-nodepool": "a"}
    assert any(matches(term, gke) for term in terms(manifest)) is not spot
    assert any(matches(term, gke | {"example.com/capacity": "spot"}) for term in terms(manifest)) is spot
    tolerated = {"key": "example.com/capacity", "operator": "Exists", "effect": "NoSchedule"}
    assert (tolerated in manifest["spec"]["tolerations"]) is spot
    assert env_of(manifest)[ENV_WATCHER_PORT]["value"] == "9999"
    assert env_of(manifest)[ENV_LOG_FORMAT]["value"] == "json"


POOLS = {
    "pools": [
        {
            "name": "a10",
            "capacityType": "spot",
            "provider": "gke",
            "nodeSelector": {"pool": "a10"},
            "tolerations": [{"key": "a10", "operator": "Exists"}],
        },
        {"name": "own", "capacityType": "spot", "provider": "custom", "nodeSelector": {"rack": "7"}},
    ]
}


def test_a_pod_of_a_pool_goes_to_that_pool_alone() -> None:
    manifest = pod(spec(capacity=POOLS), pool="a10")
    for label in ("gke-spot", "gke-preemptible"):
        assert any(matches(term, {f"cloud.google.com/{label}": "true", "pool": "a10"}) for term in terms(manifest))
        assert not any(matches(term, {f"cloud.google.com/{label}": "true"}) for term in terms(manifest))
    assert not any(matches(term, {"pool": "a10"}) for term in terms(manifest))
    assert {"key": "a10", "operator": "Exists"} in manifest["spec"]["tolerations"]


def test_without_a_named_pool_any_pool_of_the_capacity_type_will_do() -> None:
    found = terms(pod(spec(capacity=POOLS)))
    assert any(matches(term, {"rack": "7"}) for term in found)
    assert any(matches(term, {"cloud.google.com/gke-spot": "true", "pool": "a10"}) for term in found)


def test_a_capacity_type_without_a_pool_is_refused_with_a_sentence() -> None:
    with pytest.raises(ValueError, match="no pool for on-demand nodes"):
        pod(spec(capacity=POOLS), CapacityType.ON_DEMAND)


@pytest.mark.parametrize(
    "changes",
    [
        {"image": "registry.example/train:2"},
        {"env": [{"name": "A", "value": "b"}]},
        {"processesPerNode": 2},
        {"podTemplate": {"labels": {"a": "b"}}},
        {"resources": {"limits": {"memory": "1Gi"}}},
        *(
            {"podTemplate": each}
            for each in (
                {"network": "tcpx"},
                {"sameZone": "Required"},
                {"schedulerName": "gangs"},
                {"shmSize": "1Gi"},
                {"sidecars": [{"name": "logs", "image": "logs"}]},
                {"initContainers": [{"name": "fetch", "image": "fetch"}]},
                {"resourceClaims": [{"name": "a", "resourceClaimTemplateName": "a"}]},
            )
        ),
    ],
    ids=str,
)
def test_the_template_hash_changes_with_what_pods_are(changes: dict[str, Any]) -> None:
    assert template_hash(spec(**changes)) != template_hash(spec())


LARGE: dict[str, Any] = {
    "env": [{"name": "A", "value": "b"}],
    "resources": {"limits": {"nvidia.com/gpu": "8", "memory": "900Gi"}},
    "processesPerNode": 8,
    "podTemplate": {
        "labels": {"a": "b"},
        "volumes": [{"name": "data", "persistentVolumeClaim": {"claimName": "data"}}],
        "volumeMounts": [{"name": "data", "mountPath": "/data"}],
    },
}


@pytest.mark.parametrize(
    ("changes", "known"), [({}, "a8c49b0846"), (LARGE, "2719fd5fbc")], ids=["minimal", "with much"]
)
def test_an_upgraded_operator_replaces_no_pods(changes: dict[str, Any], known: str) -> None:
    """The hashes are those of version 0.1.0.

    A new default of a field or of the manifest must not change them.
    """
    assert template_hash(spec(**changes)) == known


@pytest.mark.parametrize(
    "changes",
    [
        {"nodes": {"min": 1, "max": 8}},
        {"capacity": {"onDemand": {"min": 1}}},
        {"runPolicy": {"suspend": True}},
        {"entrypoint": {"module": "train"}},
        {"batch": {"global": 64, "micro": 2}},
        {"checkpoint": {"uri": "s3://bucket/job", "interval": "5m"}},
        {"processesPerNode": 1},
    ],
    ids=["nodes", "capacity", "runPolicy", "entrypoint", "batch", "checkpoint", "a default written out"],
)
def test_the_template_hash_stays_the_same_for_what_pods_are_not(changes: dict[str, Any]) -> None:
    assert template_hash(spec(**changes)) == template_hash(spec())


def test_ranks_learn_how_many_gpus_their_container_has_asked_for() -> None:
    assert env_of(pod(spec(processesPerNode=4)))[ENV_GPUS]["value"] == "4"
    given = {"limits": {"nvidia.com/gpu": "2"}}
    assert env_of(pod(spec(processesPerNode=4, resources=given)))[ENV_GPUS]["value"] == "2"
    assert ENV_GPUS not in env_of(pod(spec(resources={"limits": {"cpu": "2"}})))


def test_a_pod_lands_on_none_of_the_nodes_to_avoid() -> None:
    affinity = pod(spec(), avoided=("n1", "n2"))["spec"]["affinity"]["nodeAffinity"]
    terms = affinity["requiredDuringSchedulingIgnoredDuringExecution"]["nodeSelectorTerms"]
    assert terms
    for term in terms:
        assert term["matchExpressions"]
        assert [(field["key"], field["operator"], field["values"]) for field in term["matchFields"]] == [
            ("metadata.name", "NotIn", ["n1"]),
            ("metadata.name", "NotIn", ["n2"]),
        ]
