"""What a user may try to get by a pod template, and how it is refused.

The module has tables for tests on a real API server.
"""

from __future__ import annotations

from typing import Any

MEGABYTE = "x" * 1_000_000
DATA = {"name": "data", "emptyDir": {}}
GOOD = {"name": "helper", "image": "helper"}
TOKEN = "/var/run/secrets/spottrain"


def template(**parts: Any) -> dict[str, Any]:
    return {"podTemplate": parts}


def sidecar(**parts: Any) -> dict[str, Any]:
    return template(sidecars=[GOOD | parts])


def init(**parts: Any) -> dict[str, Any]:
    return template(initContainers=[GOOD | parts])


def volume(**source: Any) -> dict[str, Any]:
    return template(volumes=[{"name": "data", **source}])


def limits(**amounts: Any) -> dict[str, Any]:
    return {"resources": {"limits": {key.replace("_", "-"): amount for key, amount in amounts.items()}}}


def wrong(path: str, value: str, bound: str = "of 0 or more") -> str:
    """How the API server refuses an amount."""
    return f"spec.{path}: Invalid value: {value}: not a Kubernetes quantity {bound}; write one such as "


def of_name(name: str) -> str:
    return f'unknown field "spec.podTemplate.{name}"'


TAKEN = "belong to the operator; choose another name"
SOURCE = "a volume needs exactly one source"
MOUNT = "mountPath has to be absolute, and neither /run/spottrain, /dev/shm nor below"
UNKNOWN_VOLUME = "a volumeMount names a volume that podTemplate.volumes lacks"
NO_DEVICES = "podTemplate.network needs the node's network devices in resources.limits"
MIB = "Too long: may not be more than"
RIGHTS = "sets a container's AppArmor or seccomp profile, or its devices or folders of the host"

_ROOT = "- {source: /, destination: /host, type: bind, options: [rbind, rw]}"
_DISK = "- {path: /dev/sda, type: b, major: 8, minor: 0}"
# Annotations that plug-ins of container runtimes, and runtimes themselves, obey.
RIGHTS_BY_ANNOTATION = {
    "container.apparmor.security.beta.kubernetes.io/trainer": "unconfined",
    "devices.gke.io/container.trainer": "- path: /dev/sda",
    "devices.noderesource.dev/pod": _DISK,
    "devices.nri.io": _DISK,
    "mounts.noderesource.dev/container.trainer": _ROOT,
    "mounts.nri.io/pod": _ROOT,
    "mounts.noderesource.dev": _ROOT,
    "cdi-devices.noderesource.dev/pod": "- nvidia.com/gpu=all",
    "cdi-devices.nri.io/container.trainer": "- nvidia.com/gpu=all",
    "cdi.k8s.io/gpus": "nvidia.com/gpu=all",
    "nri.io/a": "a kind of right to come",
    "noderesource.dev": "a kind of right to come",
    "io.kubernetes.cri-o.Devices": "/dev/sda",
    "devices.crio.io": "/dev/sda",
    "seccomp-profile.kubernetes.cri-o.io/trainer": "registry.dev/allows-all",
    "io.katacontainers.config.hypervisor.kernel_params": "a=b",
}

# What a user may try, and how the API server refuses it.
REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "privileged-sidecar": (
        sidecar(securityContext={"privileged": True}),
        of_name("sidecars[0].securityContext"),
    ),
    "privileged-init": (
        init(securityContext={"privileged": True}),
        of_name("initContainers[0].securityContext"),
    ),
    "root-sidecar": (sidecar(securityContext={"runAsUser": 0}), of_name("sidecars[0].securityContext")),
    "capabilities": (
        sidecar(securityContext={"capabilities": {"add": ["SYS_ADMIN"]}}),
        of_name("sidecars[0].securityContext"),
    ),
    "proc-mount": (init(securityContext={"procMount": "Unmasked"}), of_name("initContainers[0].securityContext")),
    "host-port": (sidecar(ports=[{"containerPort": 80, "hostPort": 80}]), of_name("sidecars[0].ports")),
    "env-from": (sidecar(envFrom=[{"secretRef": {"name": "all"}}]), of_name("sidecars[0].envFrom")),
    "raw-device": (
        sidecar(volumeDevices=[{"name": "disk", "devicePath": "/dev/x"}]),
        of_name("sidecars[0].volumeDevices"),
    ),
    "lifecycle": (sidecar(lifecycle={"preStop": {"exec": {"command": ["x"]}}}), of_name("sidecars[0].lifecycle")),
    "init-that-restarts": (init(restartPolicy="Always"), of_name("initContainers[0].restartPolicy")),
    "sidecar-that-does-not": (sidecar(restartPolicy="Never"), of_name("sidecars[0].restartPolicy")),
    "pod-security-context": (template(securityContext={"runAsUser": 0}), of_name("securityContext")),
    "host-network": (template(hostNetwork=True), of_name("hostNetwork")),
    "host-pid": (template(hostPID=True), of_name("hostPID")),
    "host-ipc": (template(hostIPC=True), of_name("hostIPC")),
    "host-users": (template(hostUsers=True), of_name("hostUsers")),
    "another-container": (template(containers=[GOOD]), of_name("containers")),
    "ephemeral-container": (template(ephemeralContainers=[GOOD]), of_name("ephemeralContainers")),
    "node-name": (template(nodeName="node-1"), of_name("nodeName")),
    "kubernetes-token": (template(automountServiceAccountToken=True), of_name("automountServiceAccountToken")),
    "host-path": (volume(hostPath={"path": "/"}), of_name("volumes[0].hostPath")),
    "host-path-beside-a-folder": (volume(emptyDir={}, hostPath={"path": "/"}), of_name("volumes[0].hostPath")),
    "nfs": (volume(nfs={"server": "nas", "path": "/"}), of_name("volumes[0].nfs")),
    "projected-token": (
        volume(projected={"sources": [{"serviceAccountToken": {"path": "t"}}]}),
        of_name("volumes[0].projected"),
    ),
    "host-path-of-an-init-container": (
        init(volumeMounts=[{"name": "root", "mountPath": "/host"}]),
        UNKNOWN_VOLUME,
    ),
    "no-source": (volume(), SOURCE),
    "two-sources": (volume(emptyDir={}, secret={"secretName": "a"}), SOURCE),
    "operators-volume": (template(volumes=[DATA | {"name": "spottrain-shm"}]), TAKEN),
    "volume-twice": (template(volumes=[DATA, DATA]), "two volumes have the same name; rename one of them"),
    "volume-of-no-name": (template(volumes=[DATA | {"name": "My_Data"}]), "should match"),
    "operators-token-in-a-sidecar": (
        sidecar(volumeMounts=[{"name": "spottrain-token", "mountPath": "/token"}]),
        UNKNOWN_VOLUME,
    ),
    "operators-token-in-the-trainer": (
        template(volumeMounts=[{"name": "spottrain-token", "mountPath": "/token"}]),
        UNKNOWN_VOLUME,
    ),
    "mount-over-the-token": (
        template(volumes=[DATA], volumeMounts=[{"name": "data", "mountPath": TOKEN}]),
        MOUNT,
    ),
    "mount-inside-the-token": (
        template(volumes=[DATA], volumeMounts=[{"name": "data", "mountPath": f"{TOKEN}/token"}]),
        MOUNT,
    ),
    "mount-over-shared-memory": (
        template(volumes=[DATA], volumeMounts=[{"name": "data", "mountPath": "/dev/shm"}]),
        MOUNT,
    ),
    "relative-mount": (template(volumes=[DATA], volumeMounts=[{"name": "data", "mountPath": "data"}]), MOUNT),
    "mount-of-a-megabyte": (
        template(volumes=[DATA], volumeMounts=[{"name": "data", "mountPath": f"/{MEGABYTE}"}]),
        MIB,
    ),
    "named-trainer": (sidecar(name="trainer"), TAKEN),
    "init-named-trainer": (init(name="trainer"), TAKEN),
    "named-as-the-operators": (sidecar(name="spottrain-tcpx"), TAKEN),
    "sidecar-twice": (template(sidecars=[GOOD, GOOD]), "two containers of initContainers and sidecars have the same"),
    "init-and-sidecar-alike": (
        template(sidecars=[GOOD], initContainers=[GOOD]),
        "two containers of initContainers and sidecars have the same",
    ),
    "name-in-capitals": (sidecar(name="Helper"), "should match"),
    "name-too-long": (sidecar(name="h" * 64), "Too long: may not be more than 63"),
    "no-image": (sidecar(image=""), "should be at least 1 chars long"),
    "nine-sidecars": (template(sidecars=[GOOD | {"name": f"h{n}"} for n in range(9)]), "must have at most 8 items"),
    "operators-variable": (
        {"env": [{"name": "SPOTTRAIN_CONTROL_URL", "value": "http://me"}]},
        "belong to the operator",
    ),
    "operators-variable-in-a-sidecar": (
        sidecar(env=[{"name": "SPOTTRAIN_TOKEN_FILE", "value": "/x"}]),
        "names that start with SPOTTRAIN_ belong to the operator",
    ),
    "argument-of-a-megabyte": (sidecar(args=[MEGABYTE]), MIB),
    "variable-of-a-megabyte": ({"env": [{"name": "A", "value": MEGABYTE}]}, MIB),
    "annotation-of-a-megabyte": (template(annotations={"a": MEGABYTE}), MIB),
    "label-of-a-megabyte": (template(labels={"a": MEGABYTE}), MIB),
    "label-of-no-kind": (template(labels={"a": "b c"}), "should match"),
    "operators-label": (template(labels={"spottrain.dev/job": "other"}), "choose another key"),
    "operators-annotation": (template(annotations={"spottrain.dev/pool": "other"}), "choose another key"),
    **{key: (template(annotations={key: value}), RIGHTS) for key, value in RIGHTS_BY_ANNOTATION.items()},
    "not-a-number": (limits(cpu="NaN"), wrong("resources.limits[cpu]", '"NaN"')),
    "endless": (limits(memory="Inf"), wrong("resources.limits[memory]", '"Inf"')),
    "negative": (limits(memory="-1Gi"), wrong("resources.limits[memory]", '"-1Gi"')),
    "negative-number": (limits(cpu=-1), wrong("resources.limits[cpu]", "-1")),
    "empty-amount": (limits(cpu=""), wrong("resources.limits[cpu]", '""')),
    "bytes-of-memory": (limits(memory=16), "resources.limits: the amount of memory is below 1Mi"),
    "thousandths-of-memory": (
        {"resources": {"requests": {"memory": "400m"}, "limits": {"memory": "16Gi"}}},
        "resources.requests: the amount of memory is below 1Mi",
    ),
    "bytes-of-memory-in-a-sidecar": (
        sidecar(resources={"limits": {"memory": "64"}}),
        "resources.limits: the amount of memory is below 1Mi",
    ),
    "amount-with-a-space": (limits(memory="16 Gi"), wrong("resources.limits[memory]", '"16 Gi"')),
    "amount-in-words": (limits(cpu="lots", memory="16Gi"), wrong("resources.limits[cpu]", '"lots"')),
    "fraction-that-is-not-text": (
        limits(cpu=0.5),
        "spec.resources.limits.cpu in body must be of type integer,string",
    ),
    "amount-of-a-megabyte": (limits(cpu="1" * 1_000_000), MIB),
    "negative-in-a-sidecar": (
        sidecar(resources={"requests": {"cpu": "-1"}}),
        wrong("podTemplate.sidecars[0].resources.requests[cpu]", '"-1"'),
    ),
    "unknown-resource": (limits(gpus="8"), "there is no resource of a name that is given"),
    "huge-pages-of-no-size": (limits(**{"hugepages_lots": "1Gi"}), "there is no resource of a name that is given"),
    "negative-huge-pages": (limits(**{"hugepages_2Mi": "-4Mi"}), wrong("resources.limits[hugepages-2Mi]", '"-4Mi"')),
    "huge-pages-requested-alone": (
        {"resources": {"requests": {"hugepages-2Mi": "4Mi"}}},
        "give devices and huge pages in limits",
    ),
    "half-a-device": (limits(**{"nvidia.com/gpu": "500m"}), "has to be a whole number; write one such as 8"),
    "a-device-in-bytes": (limits(**{"nvidia.com/gpu": "1Gi"}), "has to be a whole number; write one such as 8"),
    "a-device-in-words": (limits(**{"nvidia.com/gpu": "one"}), "has to be a whole number; write one such as 8"),
    "devices-overcommitted": (
        {"resources": {"requests": {"nvidia.com/gpu": "1"}, "limits": {"nvidia.com/gpu": "8"}}},
        "give devices and huge pages in limits",
    ),
    "request-above-limit": (
        {"resources": {"requests": {"memory": "2Gi"}, "limits": {"memory": "1Gi"}}},
        "an amount in requests is larger than the one in limits",
    ),
    "number-above-text": (
        {"resources": {"requests": {"cpu": 2}, "limits": {"cpu": "1500m"}}},
        "an amount in requests is larger than the one in limits",
    ),
    "text-above-number": (
        {"resources": {"requests": {"cpu": "2500m"}, "limits": {"cpu": 2}}},
        "an amount in requests is larger than the one in limits",
    ),
    "other-numbers-of-devices": (
        {"resources": {"requests": {"nvidia.com/gpu": 1}, "limits": {"nvidia.com/gpu": 8}}},
        "give devices and huge pages in limits",
    ),
    "shared-memory-of-nothing": (template(shmSize="0"), wrong("podTemplate.shmSize", '"0"', "above 0")),
    "bytes-of-shared-memory": (template(shmSize=64), "podTemplate.shmSize: below 1Mi"),
    "negative-shared-memory": (template(shmSize="-1Gi"), wrong("podTemplate.shmSize", '"-1Gi"', "above 0")),
    "shared-memory-nan": (template(shmSize="NaN"), wrong("podTemplate.shmSize", '"NaN"', "above 0")),
    "claim-of-another-namespace": (
        template(resourceClaims=[{"name": "a", "resourceClaimName": "other/claim"}]),
        "should match",
    ),
    "claim-and-template": (
        template(resourceClaims=[{"name": "a", "resourceClaimName": "a", "resourceClaimTemplateName": "a"}]),
        "give exactly one of resourceClaimName and resourceClaimTemplateName",
    ),
    "claim-of-nothing": (
        template(resourceClaims=[{"name": "a"}]),
        "give exactly one of resourceClaimName and resourceClaimTemplateName",
    ),
    "claim-twice": (
        template(resourceClaims=[{"name": "a", "resourceClaimName": "a"}] * 2),
        "two claims have the same name",
    ),
    "unknown-claim": (
        {"resources": {"claims": [{"name": "gpus"}]}},
        "resources.claims names a claim that is not in podTemplate.resourceClaims",
    ),
    "claim-for-a-sidecar": (sidecar(resources={"claims": [{"name": "a"}]}), of_name("sidecars[0].resources.claims")),
    "unknown-network": (template(network="carrier-pigeon"), 'supported values: "efa", "infiniband", "tcpx"'),
    "efa-without-devices": (template(network="efa"), NO_DEVICES),
    "efa-with-infiniband": (template(network="efa") | {"resources": {"limits": {"rdma/ib": "1"}}}, NO_DEVICES),
    "infiniband-with-gpus-alone": (
        template(network="infiniband") | {"resources": {"limits": {"nvidia.com/gpu": "8"}}},
        NO_DEVICES,
    ),
    "infiniband-with-no-claims": (template(network="infiniband") | {"resources": {"claims": []}}, NO_DEVICES),
    "unknown-zone": (template(sameZone="eu-west-1a"), 'supported values: "Preferred", "Required", "Ignored"'),
    "scheduler-of-no-name": (template(schedulerName="My Scheduler"), "should match"),
}

# What no rule refuses, and what Kubernetes then says of the pod (None: it is accepted).
HARMLESS: dict[str, tuple[dict[str, Any], str | None]] = {
    "nothing": ({}, None),
    "amounts-without-quotes": (
        template(
            shmSize=1_000_000_000,
            sidecars=[GOOD | {"resources": {"requests": {"cpu": 0}, "limits": {"memory": 100_000_000}}}],
            volumes=[{"name": "data", "emptyDir": {"sizeLimit": 1000}}],
        )
        | {"resources": {"requests": {"cpu": 2, "nvidia.com/gpu": 8}, "limits": {"cpu": "2.5", "nvidia.com/gpu": 8}}},
        None,
    ),
    "the-same-devices-as-number-and-text": (
        {"resources": {"requests": {"nvidia.com/gpu": "8"}, "limits": {"nvidia.com/gpu": 8}}},
        None,
    ),
    "everything": (
        template(
            sidecars=[GOOD | {"volumeMounts": [{"name": "data", "mountPath": "/data"}]}],
            initContainers=[{"name": "fetch", "image": "fetch", "command": ["fetch"]}],
            volumes=[DATA],
            volumeMounts=[{"name": "data", "mountPath": "/run/spottrain/.cache"}],
            schedulerName="nobody",
            shmSize="1Gi",
            sameZone="Required",
            resourceClaims=[{"name": "gpus", "resourceClaimTemplateName": "gpus"}],
        )
        | {"resources": {"claims": [{"name": "gpus"}], "limits": {"hugepages-2Mi": "4Mi"}}},
        None,
    ),
    "junk-inside-a-folder": (volume(emptyDir={"hostPath": {"path": "/"}}), None),
    "host-path-in-a-claim": (
        volume(ephemeral={"volumeClaimTemplate": {"spec": {"hostPath": "/"}}}),
        "ephemeral.volumeClaimTemplate.spec.accessModes",
    ),
    "negative-folder": (volume(emptyDir={"sizeLimit": "-1"}), "must be a valid resource quantity"),
    # A kubelet reads no object whose name has a slash.
    "volume-claim-of-another-namespace": (volume(persistentVolumeClaim={"claimName": "../other/claim"}), None),
    "secret-of-another-namespace": (volume(secret={"secretName": "kube-system/admin"}), None),
    "csi-without-a-driver": (volume(csi={}), "volumes[3].csi.driver"),
    "sub-path-to-the-outside": (
        template(volumes=[DATA], volumeMounts=[{"name": "data", "mountPath": "/x", "subPath": "../../etc"}]),
        "must not contain '..'",
    ),
    "annotations-that-give-no-rights": (
        template(
            annotations={"networking.gke.io/interfaces": "[]", "a.dev/nri.io": "", "venri.io/a": "", "crio": ""}
        ),
        None,
    ),
    "annotation-of-no-name": (template(annotations={"a b": "c"}), "metadata.annotations"),
    "library-in-the-way": ({"env": [{"name": "LD_PRELOAD", "value": "/data/evil.so"}]}, None),
}
