"""A job that sets every field of the spec.

Also what the CRD's schema doesn't say about other values. tests/field_steps.py makes steps of them.
"""

from __future__ import annotations

from typing import Any, Final

from derived_values import Schema, completed
from spottrain_api.crd import custom_resource_definition

REMOVED: Final = "removed"

_RESOURCES = {"requests": {"cpu": "100m"}, "limits": {"memory": "1Gi"}}
_BESIDE = {
    "image": "beside:1",
    "command": ["run"],
    "args": ["--fast"],
    "env": [
        {"name": "A", "value": "1"},
        {"name": "B", "valueFrom": {"configMapKeyRef": {"name": "settings", "key": "b", "optional": False}}},
        {"name": "C", "valueFrom": {"secretKeyRef": {"name": "keys", "key": "c", "optional": False}}},
    ],
    "resources": _RESOURCES,
    "volumeMounts": [{"name": "scratch", "mountPath": "/scratch", "readOnly": False, "subPath": "a"}],
}
_TOLERATION = {"key": "a", "operator": "Equal", "value": "b", "effect": "NoExecute", "tolerationSeconds": 60}


def _pool(kind: str) -> dict[str, Any]:
    return {
        "name": kind,
        "capacityType": kind,
        "provider": "custom",
        "nodeSelector": {"pool": kind},
        "tolerations": [_TOLERATION],
        "pricePerHour": 1.0,
        "weight": 2,
    }


def _karpenter_pool() -> dict[str, Any]:
    """A pool with a NodePool of its own."""
    node_class = {"group": "karpenter.k8s.aws", "kind": "EC2NodeClass", "name": "default"}
    return _pool("spot") | {"name": "own", "provider": "karpenter", "nodeClass": node_class}


def spec_schema() -> Schema:
    """The schema of a TrainingJob's spec, as in the CRD."""
    [version] = custom_resource_definition()["spec"]["versions"]
    schema: Schema = version["schema"]["openAPIV3Schema"]["properties"]["spec"]
    return schema


# Values that don't follow from the schema, or that have to fit each other.
_GIVEN: dict[str, Any] = {
    "profile": "gpu",
    "image": "train:1",
    "entrypoint": {"script": "train.py", "args": ["--fast"], "workingDir": "/app"},
    "env": _BESIDE["env"],
    "resources": {
        "requests": {"cpu": "2"},
        "limits": {"nvidia.com/gpu": "2", "memory": "64Gi"},
        "claims": [{"name": "own", "request": "first"}, {"name": "shared"}],
    },
    "podTemplate": {
        "labels": {"team": "a"},
        "annotations": {"note": "a"},
        "nodeSelector": {"disk": "fast"},
        "schedulerName": "default-scheduler",
        "tolerations": [_TOLERATION],
        "serviceAccountName": "trainer",
        "imagePullPolicy": "Always",
        "imagePullSecrets": [{"name": "registry"}],
        "priorityClassName": "high",
        "runtimeClassName": "nvidia",
        "volumes": [
            {"name": "scratch", "emptyDir": {"medium": "Memory"}},
            {"name": "settings", "configMap": {"name": "settings"}},
            {"name": "keys", "secret": {"secretName": "keys"}},
            {"name": "data", "persistentVolumeClaim": {"claimName": "data"}},
            {"name": "fast", "ephemeral": {"volumeClaimTemplate": {"spec": {"accessModes": ["ReadWriteOnce"]}}}},
            {"name": "bucket", "csi": {"driver": "gcsfuse.csi.storage.gke.io"}},
        ],
        "volumeMounts": _BESIDE["volumeMounts"],
        "shmSize": "8Gi",
        "initContainers": [{"name": "first", **_BESIDE}],
        "sidecars": [{"name": "helper", **_BESIDE}],
        "resourceClaims": [
            {"name": "own", "resourceClaimTemplateName": "gpus"},
            {"name": "shared", "resourceClaimName": "gpus"},
        ],
        "network": "infiniband",
        "terminationGracePeriodSeconds": 120,
    },
    "processesPerNode": 2,
    "nodes": {"min": 1, "max": 2},
    "capacity": {
        "onDemand": {"min": 1, "max": 2, "pricePerHour": 3.0},
        "spot": {"max": 1, "maxPrewarmed": 1, "pricePerHour": 1.0},
        "fallback": {"policy": "OnDemand", "afterSeconds": 300, "returnAfterSeconds": 900},
        "pools": [_pool("spot"), _pool("on-demand"), _karpenter_pool()],
        "finishBy": "2026-12-31T12:00:00Z",
        "currency": "EUR",
    },
    "strategy": "auto",
    "precision": "bf16",
    "deepspeed": {"zeroStage": 3, "offloadOptimizer": True, "offloadParameters": True, "config": {"a": 1}},
    "batch": {"global": 64, "micro": 4, "multipleOf": 2},
    "seed": 7,
    "checkpoint": {
        "uri": "s3://bucket/run",
        "interval": "50steps",
        "keep": 3,
        "keepEvery": 100,
        "peerReplicas": 1,
        "peerInterval": 2,
        "endpointURL": "http://store:9000",
        "encryption": "AES256",
    },
    "stability": {
        "lossSpike": {"factor": 3.0, "window": 20, "action": "skip"},
        "maxRollbacks": 2,
    },
    "runPolicy": {
        "suspend": False,
        "failureBudget": 2,
        "activeDeadlineSeconds": 10**6,
        "ttlSecondsAfterFinished": 10**6,
        "hangTimeoutSeconds": 300,
        "startTimeoutSeconds": 300,
    },
    "budget": {"maxCost": 10.0**6, "onExceeded": "Suspend"},
}
EVERYTHING: dict[str, Any] = completed(_GIVEN, spec_schema())
# A job whose volumes and claims nothing refers to.
_UNUSED = {
    "resources": {"limits": {"nvidia.com/gpu": "2"}},
    "podTemplate": {key: EVERYTHING["podTemplate"][key] for key in ("volumes", "resourceClaims")},
}
# What is different in the job for fields that exclude one of EVERYTHING's, or that others refer to.
INSTEAD: dict[str, dict[str, Any]] = {
    "capacity": {"budget": None},  # a budget needs prices, and keeps their currency
    "capacity.currency": {"budget": None},
    "entrypoint.module": {"entrypoint": {"module": "train"}},
    "podTemplate.volumes": _UNUSED,
    "podTemplate.volumes[].name": _UNUSED,
    "podTemplate.resourceClaims": _UNUSED,
    "podTemplate.resourceClaims[].name": _UNUSED,
    "deepspeed.zeroStage": {"deepspeed": {"zeroStage": 2, "offloadOptimizer": False, "offloadParameters": False}},
}
# Another valid value, if it doesn't follow from the present one.
OTHER: dict[str, list[Any]] = {
    "budget.maxCost": [2 * 10.0**6],
    "capacity.currency": ["USD"],
    "capacity.finishBy": ["2027-01-31T13:00:00+01:00"],
    "capacity.onDemand.min": [2, "50%", "1%"],
    "checkpoint.endpointURL": ["https://other", "http://[::1]:9000"],
    "checkpoint.interval": ["auto", "30s", "5m", "1steps"],
    "resources.claims": [[{"name": "own"}], [{"name": "own"}, {"name": "own", "request": "second"}]],
    "resources.claims[].name": ["shared"],
    "podTemplate.shmSize": [2**30, "2Gi"],
    "podTemplate.imagePullPolicy": ["IfNotPresent", "Never"],
    "podTemplate.imagePullSecrets[]": [{"name": "other"}],
}
_CONTAINERS = ("podTemplate.initContainers[].", "podTemplate.sidecars[].")
for _above in ("", *_CONTAINERS):
    OTHER[f"{_above}resources.requests"] = [{"cpu": 1, "memory": "1Gi"}, {}]
    OTHER[f"{_above}resources.limits"] = [{"memory": "4Gi", "ephemeral-storage": "1Gi"}, {}]
for _above in _CONTAINERS:
    OTHER[f"{_above}resources.limits{{}}"] = [2**30, "2Gi"]  # of memory
for _above in ("podTemplate.", *_CONTAINERS):
    OTHER[f"{_above}volumeMounts"] = [[*_BESIDE["volumeMounts"], {"name": "data", "mountPath": "/data"}], []]
    OTHER[f"{_above}volumeMounts[].name"] = ["data"]

_SOURCES = ("emptyDir", "configMap", "secret", "persistentVolumeClaim", "ephemeral", "csi")
_DATA = {"name": "data", "emptyDir": {}}
_UNKNOWN_VOLUME = "a volumeMount names a volume that podTemplate.volumes lacks"
_UNKNOWN_CLAIM = "resources.claims names a claim that is not in podTemplate.resourceClaims"
_ONE_CLAIM = "give exactly one of resourceClaimName and resourceClaimTemplateName"
_ONE_SOURCE = "a volume needs exactly one source"
_ONE_PROGRAM = "script and module are both set, or neither is"
_NO_RESOURCE = "there is no resource of a name that is given"
_TAKEN = "belong to the operator; choose another"
_ALIKE = "two containers of initContainers and sidecars have the same name"
# Values that the schema allows, but a rule doesn't, and what the rule says.
BROKEN_RULES: list[tuple[str, Any, str]] = [
    ("entrypoint", {"script": "a", "module": "b"}, _ONE_PROGRAM),
    ("entrypoint.script", REMOVED, _ONE_PROGRAM),
    ("entrypoint.module", REMOVED, _ONE_PROGRAM),
    ("env[].name", "SPOTTRAIN_JOB", _TAKEN),
    ("resources", REMOVED, "podTemplate.network needs the node's network devices"),
    ("resources.requests", {"cpus": 1}, f"resources.requests: {_NO_RESOURCE}"),
    ("resources.requests", {"memory": "128Gi"}, "an amount in requests is larger than the one in limits"),
    ("resources.requests", {"memory": "400m"}, "resources.requests: the amount of memory is below 1Mi"),
    ("resources.requests", {"nvidia.com/gpu": 1}, "give devices and huge pages in limits"),
    ("resources.requests{}", "-1", "not a Kubernetes quantity of 0 or more"),
    ("resources.limits", {"gpus": 1}, f"resources.limits: {_NO_RESOURCE}"),
    ("resources.limits", {"memory": 16}, "resources.limits: the amount of memory is below 1Mi"),
    ("resources.limits{}", "500m", "the amount of a device, such as nvidia.com/gpu, has to be a whole number"),
    ("resources.claims", REMOVED, "podTemplate.network needs the node's network devices"),
    ("resources.claims[].name", "own2", _UNKNOWN_CLAIM),
    ("podTemplate", REMOVED, _UNKNOWN_CLAIM),
    ("podTemplate.labels", {"spottrain.dev/job": "b"}, "podTemplate.labels: keys that start with spottrain.dev/"),
    ("podTemplate.annotations", {"spottrain.dev/a": "b"}, "podTemplate.annotations: keys that start with spottrain"),
    ("podTemplate.annotations", {"devices.gke.io/container.trainer": "b"}, "its devices or folders of the host"),
    ("podTemplate.volumes", [_DATA, _DATA], "two volumes have the same name"),
    ("podTemplate.volumes[]", REMOVED, _UNKNOWN_VOLUME),
    ("podTemplate.volumes[].name", "spottrain-run", _TAKEN),
    *((f"podTemplate.volumes[].{source}", REMOVED, _ONE_SOURCE) for source in _SOURCES),
    ("podTemplate.volumeMounts[].name", "nothing", _UNKNOWN_VOLUME),
    ("podTemplate.volumeMounts[].mountPath", "/dev/shm", "mountPath has to be absolute, and neither"),
    ("podTemplate.shmSize", "0", "not a Kubernetes quantity above 0"),
    ("podTemplate.shmSize", 16, "podTemplate.shmSize: below 1Mi"),
    ("podTemplate.initContainers[].name", "helper", _ALIKE),
    ("podTemplate.sidecars[].name", "trainer", _TAKEN),
    (
        "podTemplate.resourceClaims",
        [{"name": "own", "resourceClaimName": "gpus"}] * 2,
        "two claims have the same name",
    ),
    ("podTemplate.resourceClaims[]", REMOVED, _UNKNOWN_CLAIM),
    ("podTemplate.resourceClaims[].resourceClaimName", REMOVED, _ONE_CLAIM),
    ("podTemplate.resourceClaims[].resourceClaimTemplateName", REMOVED, _ONE_CLAIM),
    ("processesPerNode", REMOVED, "fsdp.sharding hybrid shards over the ranks of a node, but processesPerNode is 1"),
    ("processesPerNode", 1, "fsdp.sharding hybrid shards over the ranks of a node, but processesPerNode is 1"),
    ("processesPerNode", 64, "batch.global is below the largest world size"),
    ("nodes", {"min": 3, "max": 2}, "nodes.min is larger than nodes.max"),
    ("nodes.max", 513, "nodes.max is above 512"),
    ("capacity", {"onDemand": {"max": 0}, "spot": {"max": 0}}, "together are less than nodes.min"),
    ("capacity", {"spot": {"max": 0}, "pools": [_pool("spot")]}, "capacity.pools has only spot pools, and"),
    ("capacity", {"onDemand": {"max": 0}, "pools": [_pool("on-demand")]}, "capacity.pools has only on-demand pools"),
    ("capacity.onDemand", {"min": 3}, "capacity.onDemand.min is larger than nodes.max"),
    ("capacity.onDemand.min", -1, "neither a whole number of 0 or more nor a share"),
    ("capacity.onDemand.min", "half", "neither a whole number of 0 or more nor a share"),
    ("capacity.onDemand.min", "101%", "neither a whole number of 0 or more nor a share"),
    ("capacity.pools[].weight", 0, "capacity.pools: all spot pools have weight 0"),
    ("capacity.onDemand.max", 0, "capacity.onDemand.min is larger than capacity.onDemand.max"),
    ("capacity.pools[].nodeSelector", REMOVED, "a pool with provider custom needs a nodeSelector"),
    ("capacity.pools[].nodeSelector{}", REMOVED, "a pool with provider custom needs a nodeSelector"),
    ("capacity.pools[].nodeSelector", {}, "a pool with provider custom needs a nodeSelector"),
    ("strategy", "fsdp", "deepspeed holds settings that have no effect with this strategy"),
    ("strategy", "deepspeed", "fsdp holds settings that have no effect with this strategy"),
    ("precision", "fp16", "precision fp16 needs the strategy deepspeed"),
    ("deepspeed", {"zeroStage": 0, "offloadOptimizer": True}, "deepspeed.offloadOptimizer needs zeroStage 1, 2 or 3"),
    ("deepspeed", {"zeroStage": 2, "offloadParameters": True}, "deepspeed.offloadParameters needs zeroStage 3"),
    ("batch.micro", 65, "batch.micro is larger than batch.global"),
    ("batch.multipleOf", 3, "batch.global is not a multiple of batch.multipleOf"),
    ("batch.micro", 1, "batch.micro is smaller than batch.multipleOf"),
    ("checkpoint.uri", "ftp://bucket/run", "checkpoint.uri: unknown scheme or no bucket"),
    ("checkpoint.uri", "s3://bucket/run?lr=1", "checkpoint.uri: contains ? or #"),
    ("checkpoint.endpointURL", "store:9000", "checkpoint.endpointURL: not an HTTP address"),
    ("checkpoint.interval", "often", "checkpoint.interval: write auto, or a number"),
]
