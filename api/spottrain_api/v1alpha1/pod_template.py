"""The program of a job and its pods: entrypoint, environment, resources, pod template."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from spottrain_api.settings import FreeForm, Resource


class KeySelector(Resource):
    """A key of a ConfigMap or a Secret in the job's namespace."""

    name: Annotated[str, Field(description="Name of the ConfigMap or Secret.")]
    key: Annotated[str, Field(description="Key whose value to take.")]
    optional: Annotated[
        bool | None,
        Field(
            description="Whether the pod starts without the variable if the object or the key is missing. "
            "Default: false."
        ),
    ] = None


class EnvVarSource(Resource):
    """Source of the value of an environment variable."""

    config_map_key_ref: Annotated[
        KeySelector | None,
        Field(description="Key of a ConfigMap in the job's namespace that holds the value."),
    ] = None
    secret_key_ref: Annotated[
        KeySelector | None, Field(description="Key of a Secret in the job's namespace that holds the value.")
    ] = None


class EnvVar(Resource):
    """An environment variable of the ranks."""

    cel_rules = (
        (
            "!self.name.startsWith('SPOTTRAIN_') || self.name == 'SPOTTRAIN_AUDIT_DIR'",
            "env: names that start with SPOTTRAIN_ belong to the operator; choose another name",
        ),
    )
    name: Annotated[
        str,
        Field(
            min_length=1,
            max_length=256,
            description="Name of the variable. The operator owns the names that start with SPOTTRAIN_, except for "
            "SPOTTRAIN_AUDIT_DIR.",
        ),
    ]
    value: Annotated[
        str | None,
        Field(
            description="Value of the variable. $(NAME) expands to an earlier variable. "
            "Default: the value that valueFrom names, or an empty string."
        ),
    ] = None
    value_from: Annotated[
        EnvVarSource | None,
        Field(description="Source of the value. Default: none, as `value` is given instead."),
    ] = None


class Resources(Resource):
    """CPU, memory and accelerators of one pod, as in a container. Without it: one nvidia.com/gpu per process."""

    requests: Annotated[
        dict[str, str],
        Field(
            description="Amounts that the scheduler reserves on the node, by resource, as Kubernetes quantities: "
            "cpu in cores, memory in bytes (16Gi), nvidia.com/gpu in devices. Default: the limits."
        ),
    ] = Field(default_factory=dict)
    limits: Annotated[
        dict[str, str],
        Field(
            description="Largest amounts that the pod may use, by resource, as Kubernetes quantities. "
            "Accelerators are given here. Default: none."
        ),
    ] = Field(default_factory=dict)


class Volume(Resource):
    """A volume of the pods: emptyDir, configMap, secret or persistentVolumeClaim. Nothing of the host."""

    name: Annotated[str, Field(description="Name that volumeMounts refer to.")]
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


class VolumeMount(Resource):
    """Mount of a volume in the container of a pod."""

    name: Annotated[str, Field(description="Name of a volume in podTemplate.volumes.")]
    mount_path: Annotated[str, Field(description="Absolute path in the container.")]
    read_only: Annotated[
        bool | None, Field(description="Whether the ranks can't write to the volume. Default: false.")
    ] = None
    sub_path: Annotated[
        str | None, Field(description="Path in the volume to mount. Default: the root of the volume.")
    ] = None


class Toleration(Resource):
    """A taint on which pods may run nevertheless, as in a pod."""

    key: Annotated[str | None, Field(description="Key of the taint. Default: any key, if operator is Exists.")] = None
    operator: Annotated[
        str | None,
        Field(description="How value is compared: Equal, or Exists for any value. Default: Equal."),
    ] = None
    value: Annotated[
        str | None, Field(description="Value of the taint, if operator is Equal. Default: an empty string.")
    ] = None
    effect: Annotated[
        str | None,
        Field(description="Effect of the taint: NoSchedule, PreferNoSchedule or NoExecute. Default: any effect."),
    ] = None
    toleration_seconds: Annotated[
        int | None,
        Field(description="Seconds that a pod stays on the node after a NoExecute taint appears. Default: no limit."),
    ] = None


class PodTemplate(Resource):
    """Settings of the job's pods. The operator decides everything else, so that pods stay restricted.

    If a setting is edited, the running generation commits and ends, and new pods replace the old ones.
    """

    labels: Annotated[
        dict[str, str], Field(description="Labels of the pods, beside the operator's own. Default: none.")
    ] = Field(default_factory=dict)
    annotations: Annotated[
        dict[str, str], Field(description="Annotations of the pods, beside the operator's own. Default: none.")
    ] = Field(default_factory=dict)
    node_selector: Annotated[
        dict[str, str],
        Field(description="Labels that a node must have, beside those that say how it is bought. Default: none."),
    ] = Field(default_factory=dict)
    tolerations: Annotated[
        tuple[Toleration, ...],
        Field(
            max_length=32,
            description="Taints that the pods tolerate, beside those of spot nodes (on spot nodes only) and of GPU "
            "nodes.",
        ),
    ] = ()
    service_account_name: Annotated[
        str | None,
        Field(
            description="Service account of the pods, for example one that a cloud maps to a role with access to the "
            "bucket. Its Kubernetes token is not mounted. Default: the namespace's `default`."
        ),
    ] = None
    image_pull_policy: Annotated[
        str | None,
        Field(
            description="When the node pulls the image: Always, IfNotPresent or Never. "
            "Default: Always for the tag latest, otherwise IfNotPresent."
        ),
    ] = None
    image_pull_secrets: Annotated[
        tuple[dict[str, str], ...],
        Field(max_length=8, description="Secrets with which the node pulls the image, each as `name: secret`."),
    ] = ()
    priority_class_name: Annotated[
        str | None, Field(description="Priority class of the pods. Default: the cluster's default class.")
    ] = None
    volumes: Annotated[tuple[Volume, ...], Field(max_length=32, description="Volumes of each pod.")] = ()
    volume_mounts: Annotated[
        tuple[VolumeMount, ...], Field(max_length=32, description="Mounts of the volumes in each pod's container.")
    ] = ()
    termination_grace_period_seconds: Annotated[
        int,
        Field(
            ge=1,
            le=3600,
            description="Seconds that Kubernetes gives a pod to commit and end after its deletion was asked for.",
        ),
    ] = 120
