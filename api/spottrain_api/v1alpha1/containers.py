"""What a container is made of: environment, resources, mounts, and the containers beside the trainer's."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from spottrain_api.contract.names import TRAINER_CONTAINER
from spottrain_api.settings.resource import Argument, Resource
from spottrain_api.v1alpha1.quantities import Quantity, as_quantity, is_quantity

# Names of the container and the volumes that the operator adds to each pod.
OWN_PREFIX = "spottrain-"
# Mount points that the operator uses in the trainer's container.
RUN_DIR = "/run/spottrain"
TOKEN_DIR = "/var/run/secrets/spottrain"
SHM_DIR = "/dev/shm"
TMP_DIR = "/tmp"

# A name in a list of a pod: a DNS label.
Name = Annotated[str, Field(max_length=63, pattern=r"^[a-z0-9]([-a-z0-9]*[a-z0-9])?$")]
# A name of an object in the namespace: a DNS subdomain.
ObjectName = Annotated[str, Field(max_length=253, pattern=r"^[a-z0-9]([-a-z0-9.]*[a-z0-9])?$")]
LabelValue = Annotated[str, Field(max_length=63, pattern=r"^(([A-Za-z0-9][-A-Za-z0-9_.]*)?[A-Za-z0-9])?$")]


class KeySelector(Resource):
    """A key of a ConfigMap or a Secret in the job's namespace."""

    name: Annotated[ObjectName, Field(description="Name of the ConfigMap or Secret.")]
    key: Annotated[str, Field(max_length=253, description="Key whose value to take.")]
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
    """An environment variable of a container."""

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
        Argument | None,
        Field(
            description="Value of the variable. $(NAME) expands to an earlier variable. "
            "Default: the value that valueFrom names, or an empty string."
        ),
    ] = None
    value_from: Annotated[
        EnvVarSource | None,
        Field(description="Source of the value. Default: none, as `value` is given instead."),
    ] = None


class VolumeMount(Resource):
    """Mount of a volume in a container."""

    cel_rules = (
        (
            "self.mountPath.startsWith('/') && "
            f"!(self.mountPath in ['{RUN_DIR}', '{SHM_DIR}']) && !self.mountPath.startsWith('{TOKEN_DIR}')",
            f"volumeMounts: mountPath has to be absolute, and neither {RUN_DIR}, {SHM_DIR} nor below {TOKEN_DIR}, "
            "which the operator mounts; choose another path",
        ),
    )
    name: Annotated[Name, Field(description="Name of a volume in podTemplate.volumes.")]
    mount_path: Annotated[str, Field(max_length=1024, description="Absolute path in the container.")]
    read_only: Annotated[
        bool | None, Field(description="Whether the container can't write to the volume. Default: false.")
    ] = None
    sub_path: Annotated[
        str | None,
        Field(max_length=1024, description="Path in the volume to mount. Default: the root of the volume."),
    ] = None


_REQUEST, _LIMIT = "self.requests[name]", "self.limits[name]"
_REQUEST_AND_LIMIT_KNOWN = f"({is_quantity(_REQUEST)} && {is_quantity(_LIMIT)})"
_REQUEST_COMPARED = f"{as_quantity(_REQUEST)}.compareTo({as_quantity(_LIMIT)})"
# A runtime refuses to start a container with less than some MiB. Who writes 16 or 400m means another unit.
LEAST_MEMORY = "1Mi"


def is_memory(given: str) -> str:
    """The CEL test whether `given` is 0, for none, or enough for a process.

    What isn't an amount breaks a rule of its own.
    """
    compared = f"{as_quantity(given)}.compareTo(quantity"
    return f"!{is_quantity(given)} || {compared}('0')) == 0 || {compared}('{LEAST_MEMORY}')) >= 0"


class Amounts(Resource):
    """CPU, memory and devices of a container."""

    cel_rules = (
        *(
            (
                f"!has(self.{field}) || self.{field}.all(name, name in ['cpu', 'memory', 'ephemeral-storage'] || "
                "name.contains('/') || (name.startsWith('hugepages-') && isQuantity(name.substring(10))))",
                f"resources.{field}: there is no resource of a name that is given; use cpu, memory, "
                "ephemeral-storage, hugepages-2Mi, hugepages-1Gi, or a device such as nvidia.com/gpu",
            )
            for field in ("requests", "limits")
        ),
        *(
            (
                f"!has(self.{field}) || !('memory' in self.{field}) || " + is_memory(f"self.{field}['memory']"),
                f"resources.{field}: the amount of memory is below {LEAST_MEMORY}, too little for any process; a "
                "number alone counts bytes, and m means thousandths, so write one such as 16Gi",
            )
            for field in ("requests", "limits")
        ),
        (
            "!has(self.limits) || self.limits.all(name, !name.contains('/') || "
            f"type({_LIMIT}) == int || {_LIMIT}.matches('^[0-9]+$'))",
            "resources.limits: the amount of a device, such as nvidia.com/gpu, has to be a whole number; write one "
            "such as 8, without a unit",
        ),
        (
            f"!has(self.requests) || !has(self.limits) || self.requests.all(name, !(name in self.limits) || "
            f"!{_REQUEST_AND_LIMIT_KNOWN} || {_REQUEST_COMPARED} <= 0)",
            "resources: an amount in requests is larger than the one in limits; lower it, or raise the limit",
        ),
        (
            "!has(self.requests) || self.requests.all(name, "
            "!(name.contains('/') || name.startsWith('hugepages-')) || "
            f"(has(self.limits) && name in self.limits && "
            f"(!{_REQUEST_AND_LIMIT_KNOWN} || {_REQUEST_COMPARED} == 0)))",
            "resources: give devices and huge pages in limits; requests may only repeat the same amount",
        ),
    )
    requests: Annotated[
        dict[str, Quantity],
        Field(
            max_length=32,
            description="Amounts that the scheduler reserves on the node, by resource, as Kubernetes quantities: "
            "cpu in cores, memory in bytes (16Gi), nvidia.com/gpu in devices. Fractions are text (500m). "
            "Default: the limits. Without a limit, one core and 4Gi for each process of the trainer, and "
            "100m and 128Mi for another container.",
        ),
    ] = Field(default_factory=dict)
    limits: Annotated[
        dict[str, Quantity],
        Field(
            max_length=32,
            description="Largest amounts that the container may use, by resource, as Kubernetes quantities. "
            "Devices and huge pages (hugepages-2Mi) are given here. Default: none.",
        ),
    ] = Field(default_factory=dict)


class DeviceClaim(Resource):
    """A claim of podTemplate.resourceClaims whose devices the trainer gets."""

    name: Annotated[Name, Field(description="Name of a claim in podTemplate.resourceClaims.")]
    request: Annotated[
        Name | None, Field(description="Request of the claim whose devices to take. Default: all requests.")
    ] = None


class Resources(Amounts):
    """CPU, memory and accelerators of the trainer.

    Without it: one nvidia.com/gpu per process.
    """

    claims: Annotated[
        tuple[DeviceClaim, ...],
        Field(max_length=16, description="Devices by dynamic resource allocation, of podTemplate.resourceClaims."),
    ] = ()


class Container(Resource):
    """A container beside the trainer's.

    It is as restricted: not root, without capabilities and privileges.
    """

    cel_rules = (
        (
            f"self.name != '{TRAINER_CONTAINER}' && !self.name.startsWith('{OWN_PREFIX}')",
            f"podTemplate: the container name {TRAINER_CONTAINER}, and names that start with {OWN_PREFIX}, belong to "
            "the operator; choose another name",
        ),
    )
    name: Annotated[Name, Field(description="Name of the container. No other container of the pod may have it.")]
    image: Annotated[str, Field(min_length=1, max_length=1024, description="Image of the container.")]
    command: Annotated[
        tuple[Argument, ...],
        Field(max_length=64, description="Program and its first arguments. Default: the image's entrypoint."),
    ] = ()
    args: Annotated[
        tuple[Argument, ...], Field(max_length=256, description="Arguments. Default: those of the image.")
    ] = ()
    env: Annotated[
        tuple[EnvVar, ...], Field(max_length=64, description="Environment variables of the container.")
    ] = ()
    resources: Amounts = Amounts()
    volume_mounts: Annotated[
        tuple[VolumeMount, ...], Field(max_length=16, description="Mounts of volumes in podTemplate.volumes.")
    ] = ()
