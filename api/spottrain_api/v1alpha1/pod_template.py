"""The pods of a job.

The template sets labels, placement, volumes, containers beside the trainer's, and the network.
"""

from __future__ import annotations

from enum import StrEnum
from typing import Annotated

from pydantic import Field

from spottrain_api.contract.names import GROUP
from spottrain_api.settings.resource import FreeForm, Resource
from spottrain_api.v1alpha1.containers import (
    LEAST_MEMORY,
    OWN_PREFIX,
    RUN_DIR,
    Container,
    LabelValue,
    Name,
    ObjectName,
    VolumeMount,
    is_memory,
)
from spottrain_api.v1alpha1.quantities import PositiveQuantity

_SOURCES = ("emptyDir", "configMap", "secret", "persistentVolumeClaim", "ephemeral", "csi")
# Annotations by which a pod gets devices or folders of the host, or loses its AppArmor or seccomp profile. NRI's and
# GKE's plug-ins, CDI, CRI-O and Kata Containers read them. A domain counts as a whole, because it gets new names.
# The chart's policy on the operator's pods has the same rule.
_RIGHTS_BY_ANNOTATION = (
    r"^(([^/]*[.])?(cdi[.]k8s[.]io|container[.]apparmor[.]security[.]beta[.]kubernetes[.]io|cri-?o[.]io|"
    r"devices[.]gke[.]io|noderesource[.]dev|nri[.]io)(/|$)|io[.](katacontainers|kubernetes[.]cri-o)[.])"
)


class Volume(Resource):
    """A volume of the pods, with exactly one source. Nothing of the host."""

    cel_rules = (
        (
            f"!self.name.startsWith('{OWN_PREFIX}')",
            f"podTemplate.volumes: names that start with {OWN_PREFIX} belong to the operator; choose another name",
        ),
        (
            f"[{', '.join(f'has(self.{source})' for source in _SOURCES)}].filter(given, given).size() == 1",
            f"podTemplate.volumes: a volume needs exactly one source: {', '.join(_SOURCES[:-1])} or {_SOURCES[-1]}",
        ),
    )
    name: Annotated[Name, Field(description="Name that volumeMounts refer to.")]
    empty_dir: Annotated[
        FreeForm | None,
        Field(alias="emptyDir", description="Folder that starts empty and goes with its pod, as in a pod."),
    ] = None
    config_map: Annotated[
        FreeForm | None,
        Field(alias="configMap", description="ConfigMap of the namespace whose keys become files, as in a pod."),
    ] = None
    secret: Annotated[
        FreeForm | None, Field(description="Secret of the namespace whose keys become files, as in a pod.")
    ] = None
    persistent_volume_claim: Annotated[
        FreeForm | None,
        Field(
            alias="persistentVolumeClaim",
            description="Claim of the namespace to mount, as in a pod. All pods of the job share it.",
        ),
    ] = None
    ephemeral: Annotated[
        FreeForm | None,
        Field(description="Claim that Kubernetes makes for each pod, and deletes with it, as in a pod."),
    ] = None
    csi: Annotated[
        FreeForm | None,
        Field(description="Volume that a CSI driver of the cluster makes for each pod, as in a pod."),
    ] = None


class ResourceClaim(Resource):
    """Devices by dynamic resource allocation (DRA), from the job's namespace."""

    cel_rules = (
        (
            "has(self.resourceClaimName) != has(self.resourceClaimTemplateName)",
            "podTemplate.resourceClaims: give exactly one of resourceClaimName and resourceClaimTemplateName",
        ),
    )
    name: Annotated[Name, Field(description="Name that resources.claims refer to.")]
    resource_claim_name: Annotated[
        ObjectName | None,
        Field(description="ResourceClaim that all pods of the job share. Default: none, as a template is given."),
    ] = None
    resource_claim_template_name: Annotated[
        ObjectName | None,
        Field(
            description="ResourceClaimTemplate from which each pod gets a claim of its own. "
            "Default: none, as a claim is given."
        ),
    ] = None


class SameZone(StrEnum):
    """Whether the pods of the job go to one zone (topology.kubernetes.io/zone).

    - Preferred: to one zone as long as it has nodes.
    - Required: to the zone of the first pod. The others wait for nodes there. Nodes without a zone get no pods.
    - Ignored: to any zone.
    - Spread: to all zones alike as long as they have nodes, so that the shortage of one takes few of them.
    """

    PREFERRED = "Preferred"
    REQUIRED = "Required"
    IGNORED = "Ignored"
    SPREAD = "Spread"


class Network(StrEnum):
    """Network between GPUs of different nodes.

    The administrator has to allow it (chart: jobs.allowedNetworks).

    - efa: Elastic Fabric Adapter of AWS.
    - infiniband: InfiniBand, or RDMA over Ethernet.
    - tcpx: GPUDirect-TCPX of GKE's A3 High nodes.
    """

    EFA = "efa"
    INFINIBAND = "infiniband"
    TCPX = "tcpx"


class Toleration(Resource):
    """A taint on which pods may run nevertheless, as in a pod."""

    key: Annotated[
        str | None,
        Field(max_length=317, description="Key of the taint. Default: any key, if operator is Exists."),
    ] = None
    operator: Annotated[
        str | None,
        Field(max_length=16, description="How value is compared: Equal, or Exists for any value. Default: Equal."),
    ] = None
    value: Annotated[
        str | None,
        Field(max_length=63, description="Value of the taint, if operator is Equal. Default: an empty string."),
    ] = None
    effect: Annotated[
        str | None,
        Field(
            max_length=32,
            description="Effect of the taint: NoSchedule, PreferNoSchedule or NoExecute. Default: any effect.",
        ),
    ] = None
    toleration_seconds: Annotated[
        int | None,
        Field(description="Seconds that a pod stays on the node after a NoExecute taint appears. Default: no limit."),
    ] = None


def _all_mounts(test: str) -> str:
    """The rule that `test` holds for every volumeMount of a pod template."""
    of_others = " && ".join(
        f"(!has(self.{each}) || self.{each}.all(c, !has(c.volumeMounts) || c.volumeMounts.all({test})))"
        for each in ("initContainers", "sidecars")
    )
    return f"(!has(self.volumeMounts) || self.volumeMounts.all({test})) && {of_others}"


class PodTemplate(Resource):
    """Settings of the job's pods.

    The operator decides everything else, so that pods stay restricted.

    If a setting is edited, the running generation commits and ends, and new pods replace the old ones.
    """

    cel_rules = (
        *(
            (
                f"!has(self.{field}) || self.{field}.all(key, !key.startsWith('{GROUP}/'))",
                f"podTemplate.{field}: keys that start with {GROUP}/ belong to the operator; choose another key",
            )
            for field in ("labels", "annotations")
        ),
        (
            f"!has(self.annotations) || !self.annotations.exists(key, key.matches('{_RIGHTS_BY_ANNOTATION}'))",
            "podTemplate.annotations: an annotation sets a container's AppArmor or seccomp profile, or its devices "
            "or folders of the host, which only the operator may; remove it",
        ),
        (
            f"!has(self.shmSize) || {is_memory('self.shmSize')}",
            f"podTemplate.shmSize: below {LEAST_MEMORY}; a number alone counts bytes, write one such as 16Gi",
        ),
        (
            "!has(self.volumes) || self.volumes.all(a, self.volumes.exists_one(b, a.name == b.name))",
            "podTemplate.volumes: two volumes have the same name; rename one of them",
        ),
        (
            _all_mounts("m, has(self.volumes) && self.volumes.exists(volume, volume.name == m.name)"),
            "podTemplate: a volumeMount names a volume that podTemplate.volumes lacks; add it, or correct the name",
        ),
        (
            "(!has(self.initContainers) || self.initContainers.all(a, "
            "self.initContainers.exists_one(b, a.name == b.name))) && "
            "(!has(self.sidecars) || self.sidecars.all(a, self.sidecars.exists_one(b, a.name == b.name) && "
            "(!has(self.initContainers) || !self.initContainers.exists(b, a.name == b.name))))",
            "podTemplate: two containers of initContainers and sidecars have the same name; rename one of them",
        ),
        (
            "!has(self.resourceClaims) || "
            "self.resourceClaims.all(a, self.resourceClaims.exists_one(b, a.name == b.name))",
            "podTemplate.resourceClaims: two claims have the same name; rename one of them",
        ),
    )
    labels: Annotated[
        dict[str, LabelValue],
        Field(
            max_length=64,
            description="Labels of the pods, beside the operator's own. They can switch on the sidecar of a service "
            "mesh (sidecar.istio.io/inject, istio.io/dataplane-mode), which is off. Default: none.",
        ),
    ] = Field(default_factory=dict)
    annotations: Annotated[
        dict[str, Annotated[str, Field(max_length=65_536)]],
        Field(
            max_length=64,
            description="Annotations of the pods, beside the operator's own. They can switch on the sidecar of a "
            "service mesh (linkerd.io/inject), which is off. Default: none.",
        ),
    ] = Field(default_factory=dict)
    node_selector: Annotated[
        dict[str, LabelValue],
        Field(
            max_length=64,
            description="Labels that a node must have, beside those that say how it is bought. Default: none.",
        ),
    ] = Field(default_factory=dict)
    same_zone: Annotated[
        SameZone | None,
        Field(
            description="Whether the pods of the job go to one zone (topology.kubernetes.io/zone). Traffic between "
            "zones is slower, and clouds charge for it. Default: Preferred; for the networks efa and tcpx Required."
        ),
    ] = None
    scheduler_name: Annotated[
        ObjectName | None, Field(description="Scheduler of the pods. Default: the cluster's default scheduler.")
    ] = None
    tolerations: Annotated[
        tuple[Toleration, ...],
        Field(
            max_length=32,
            description="Taints that the pods tolerate, beside those of spot nodes (on spot nodes only) and of GPU "
            "nodes.",
        ),
    ] = ()
    service_account_name: Annotated[
        ObjectName | None,
        Field(
            description="Service account of the pods, for example one that a cloud maps to a role with access to the "
            "bucket. Its Kubernetes token is not mounted. Default: the namespace's `default`."
        ),
    ] = None
    image_pull_policy: Annotated[
        str | None,
        Field(
            max_length=16,
            description="When the node pulls the image: Always, IfNotPresent or Never. "
            "Default: Always for the tag latest, otherwise IfNotPresent.",
        ),
    ] = None
    image_pull_secrets: Annotated[
        tuple[Annotated[dict[str, ObjectName], Field(max_length=1)], ...],
        Field(max_length=8, description="Secrets with which the node pulls the image, each as `name: secret`."),
    ] = ()
    priority_class_name: Annotated[
        ObjectName | None, Field(description="Priority class of the pods. Default: the cluster's default class.")
    ] = None
    runtime_class_name: Annotated[
        ObjectName | None,
        Field(
            description="RuntimeClass of the pods, such as nvidia on clusters where the container runtime gives GPUs "
            "only to pods of that class. Default: the node's default runtime."
        ),
    ] = None
    volumes: Annotated[tuple[Volume, ...], Field(max_length=32, description="Volumes of each pod.")] = ()
    volume_mounts: Annotated[
        tuple[VolumeMount, ...],
        Field(max_length=32, description="Mounts of the volumes in the trainer's container of each pod."),
    ] = ()
    read_only_root_filesystem: Annotated[
        bool,
        Field(
            description="Whether the trainer's container can't write to its image's file system. /tmp and "
            f"{RUN_DIR}, its home, are then folders of the pod, and volumes stay as they are."
        ),
    ] = False
    shm_size: Annotated[
        PositiveQuantity | None,
        Field(
            description="Size of /dev/shm, as a quantity of bytes (64Gi). It lives in memory: what it holds counts "
            "against resources.limits.memory. Default: that limit, or the node's memory if there is none."
        ),
    ] = None
    init_containers: Annotated[
        tuple[Container, ...],
        Field(
            max_length=8,
            description="Containers that run to their end, one after the other, before the trainer starts and after "
            "the sidecars have started. If one fails, the pod fails.",
        ),
    ] = ()
    sidecars: Annotated[
        tuple[Container, ...],
        Field(
            max_length=8,
            description="Containers that start before the trainer, and run as long as it does. One that ends is "
            "restarted; the trainer continues.",
        ),
    ] = ()
    resource_claims: Annotated[
        tuple[ResourceClaim, ...],
        Field(max_length=16, description="Devices by dynamic resource allocation, for resources.claims."),
    ] = ()
    network: Annotated[
        Network | None,
        Field(
            description="Network between GPUs of different nodes: rights, devices and environment that it needs. The "
            "administrator has to allow it (chart: jobs.allowedNetworks). Default: TCP over the pods' network."
        ),
    ] = None
    termination_grace_period_seconds: Annotated[
        int,
        Field(
            ge=1,
            le=3600,
            description="Seconds that Kubernetes gives a pod to commit and end after its deletion was asked for.",
        ),
    ] = 120
