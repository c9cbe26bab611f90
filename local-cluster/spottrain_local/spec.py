"""The cluster that a user asks for: node pools, read from YAML."""

import re
from pathlib import Path
from typing import Annotated, Literal

import yaml
from pydantic import AfterValidator, BaseModel, ConfigDict, Field, ValidationError, field_validator
from pydantic.alias_generators import to_camel

from spottrain_api.mistakes import mistakes
from spottrain_local import shapes
from spottrain_local.address import MAX_NODES
from spottrain_local.go_module import DEFAULT_KUBERNETES, KubernetesRelease
from spottrain_local.layout import LocalClusterError

SYSTEM_POOL = "system"
Runtime = Literal["process", "podman"]
Name = Annotated[str, Field(pattern=r"^[a-z0-9]([a-z0-9-]{0,40}[a-z0-9])?$")]


class _Model(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", alias_generator=to_camel, populate_by_name=True)


# What the API server takes. A node can't give itself other labels of Kubernetes' own domains: see
# https://kubernetes.io/docs/reference/access-authn-authz/admission-controllers/#noderestriction
_NAME = r"([A-Za-z0-9][-A-Za-z0-9_.]{0,61})?[A-Za-z0-9]"
_VALUE = rf"^({_NAME})?$"
_PREFIX = r"[a-z0-9]([-a-z0-9.]*[a-z0-9])?"
_OF_KUBERNETES = re.compile(r"([^/]*\.)?(kubernetes|k8s)\.io/")
_OF_KUBELETS = re.compile(
    r"([^/]*\.)?(kubelet|node)\.kubernetes\.io/|(topology|failure-domain\.beta)\.kubernetes\.io/(zone|region)$"
    r"|(beta\.)?kubernetes\.io/(hostname|arch|os|instance-type)$"
)


def _may_be_given(label: str) -> str:
    if _OF_KUBERNETES.match(label) and not _OF_KUBELETS.match(label):
        raise ValueError("a node can't give itself this label of Kubernetes; use a domain of your own")
    return label


_Key = Annotated[str, Field(pattern=rf"^({_PREFIX}/)?{_NAME}$")]
_Value = Annotated[str, Field(pattern=_VALUE)]


class TaintSpec(_Model):
    """A taint as Kubernetes writes it."""

    key: Annotated[_Key, Field(description="Key, such as `example.com/team`.")]
    value: Annotated[_Value, Field(description="Value.")] = ""
    effect: Annotated[
        Literal["NoSchedule", "PreferNoSchedule", "NoExecute"],
        Field(description="What happens to pods that do not tolerate the taint."),
    ]


class NodePool(_Model):
    """Nodes of one kind.

    Kubernetes counts their GPUs, processors and memory; pods use what the machine has.
    """

    name: Annotated[
        Name,
        Field(
            description="Name of the pool: lower-case letters, digits and hyphens. Its nodes are `<name>-0`, "
            "`<name>-1`, … If a pool is named `system`, the operator runs on it."
        ),
    ]
    count: Annotated[int, Field(ge=1, le=MAX_NODES, description="Number of nodes.")] = 1
    provider: Annotated[
        shapes.Provider,
        Field(description="Cloud whose labels, taints, provider ids and metadata server the nodes have."),
    ] = "eks"
    capacity_type: Annotated[
        shapes.CapacityName, Field(description="Whether the nodes are spot nodes, in the terms of their cloud.")
    ] = "on-demand"
    gpus: Annotated[int, Field(ge=0, le=16, description="Number of GPUs (`nvidia.com/gpu`) of a node.")] = 8
    instance_type: Annotated[
        _Value, Field(description="Instance type. If empty, the provider's smallest with as many GPUs.")
    ] = ""
    zone: Annotated[
        _Value,
        Field(
            description="Zone, from which the region follows. If empty, `us-east-1a` for eks, `us-central1-a` for "
            "gke, `eastus-1` for aks."
        ),
    ] = ""
    cpu: Annotated[
        str,
        Field(
            pattern=r"^([0-9]+m?)?$",
            description="Processors of a node, such as `8` or `500m`. If empty, those of the instance type.",
        ),
    ] = ""
    memory: Annotated[
        str,
        Field(
            pattern=r"^([0-9]+(k|[MGT]|[KMGT]i)?)?$",
            description="Memory of a node, such as `32Gi`. If empty, that of the instance type.",
        ),
    ] = ""
    labels: dict[Annotated[_Key, AfterValidator(_may_be_given)], _Value] = Field(
        default_factory=dict, description="More labels of the nodes. They override those of the provider."
    )
    taints: list[TaintSpec] = Field(
        default_factory=list, description="More taints of the nodes, beside those of the provider."
    )

    @field_validator("cpu", "memory", mode="before")
    @classmethod
    def _number_is_text(cls, value: object) -> object:
        return str(value) if isinstance(value, int) else value

    def node_names(self) -> list[str]:
        return [f"{self.name}-{index}" for index in range(self.count)]

    @property
    def like(self) -> shapes.InstanceType:
        """Instance type of the provider that has the pool's GPUs."""
        return shapes.instance_type_with(self.provider, self.gpus)

    @property
    def chosen_instance_type(self) -> str:
        return self.instance_type or self.like.name

    @property
    def chosen_cpu(self) -> str:
        return self.cpu or self.like.cpu

    @property
    def chosen_memory(self) -> str:
        return self.memory or self.like.memory

    @property
    def chosen_zone(self) -> str:
        return self.zone or shapes.DEFAULT_ZONES[self.provider]


class ClusterSpec(_Model):
    """All nodes of a cluster."""

    runtime: Annotated[
        Runtime,
        Field(description="Whether pods run as processes of this machine, or in containers with podman."),
    ] = "process"
    kubernetes: Annotated[
        KubernetesRelease,
        Field(description="Release of Kubernetes. 1.37 runs with its gang scheduling switched on."),
    ] = DEFAULT_KUBERNETES
    nodes: list[NodePool] = Field(default_factory=list, description="Node pools.")

    @field_validator("kubernetes", mode="before")
    @classmethod
    def _release_is_text(cls, value: object) -> object:
        return str(value) if isinstance(value, float) else value

    @field_validator("nodes")
    @classmethod
    def _names_are_unique(cls, nodes: list[NodePool]) -> list[NodePool]:
        names = [name for pool in nodes for name in pool.node_names()]
        doubles = sorted({name for name in names if names.count(name) > 1})
        if doubles:
            raise ValueError(f"two nodes would be called {doubles[0]}; give the pools different names")
        if len(names) > MAX_NODES:
            raise ValueError(f"{len(names)} nodes are too many for one machine; use at most {MAX_NODES}")
        return nodes

    def pool_of_nodes(self) -> dict[str, NodePool]:
        """Map every node's name to its pool.

        The order is the one that gives nodes their addresses.
        """
        return {name: pool for pool in self.nodes for name in pool.node_names()}


DEFAULT_SPEC = ClusterSpec(
    nodes=[
        NodePool(name=SYSTEM_POOL, gpus=0),
        NodePool(name="on-demand", count=2),
        NodePool(name="spot", count=4, capacity_type="spot"),
    ]
)


def load_spec(path: Path) -> ClusterSpec:
    """Read a cluster's nodes from a YAML file with one key: `nodes`.

    Its value is a list of `NodePool`s.

    Raises:
        LocalClusterError: The file cannot be read, or is invalid; the text has a sentence for each mistake.
    """
    try:
        data = yaml.safe_load(path.read_bytes())
    except OSError as error:
        raise LocalClusterError(f"The file {path} cannot be read: {error.strerror}. Correct --nodes.") from error
    except yaml.YAMLError as error:
        raise LocalClusterError(f"The file {path} is not YAML: {str(error).replace(chr(10), ' ')}.") from error
    if not isinstance(data, dict) or "nodes" not in data:
        raise LocalClusterError(f"The file {path} must have the key `nodes`, a list of node pools.")
    try:
        return ClusterSpec.model_validate(data)
    except ValidationError as error:
        raise LocalClusterError(f"The file {path} is invalid. {mistakes(error)}") from error
