"""The cluster that a user asks for: node pools, read from YAML."""

import re
from pathlib import Path
from typing import Annotated, Literal

import yaml
from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator, model_validator
from pydantic.alias_generators import to_camel

from spottrain_local import shapes
from spottrain_local.address import MAX_NODES
from spottrain_local.layout import LocalClusterError

SYSTEM_POOL = "system"
Name = Annotated[str, Field(pattern=r"^[a-z0-9]([a-z0-9-]{0,40}[a-z0-9])?$")]


class _Model(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", alias_generator=to_camel, populate_by_name=True)


class TaintSpec(_Model):
    """A taint as Kubernetes writes it."""

    key: str
    value: str = ""
    effect: Literal["NoSchedule", "PreferNoSchedule", "NoExecute"]


class NodePool(_Model):
    """Nodes of one kind; they are named `<name>-0`, `<name>-1`, …

    GPUs, processors and memory are only counted. What isn't given is that of an instance type with as many GPUs.
    """

    name: Name
    count: int = Field(default=1, ge=1, le=MAX_NODES)
    provider: shapes.Provider = "eks"
    capacity_type: shapes.CapacityName = "on-demand"
    gpus: int = Field(default=8, ge=0, le=16)
    instance_type: str = ""
    zone: str = ""
    cpu: str = Field(default="", pattern=r"^([0-9]+m?)?$")
    memory: str = Field(default="", pattern=r"^([0-9]+([KMGT]i?)?)?$")
    labels: dict[str, str] = Field(default_factory=dict)
    taints: list[TaintSpec] = Field(default_factory=list)

    @field_validator("cpu", "memory", mode="before")
    @classmethod
    def _number_is_text(cls, value: object) -> object:
        return str(value) if isinstance(value, int) else value

    def node_names(self) -> list[str]:
        return [f"{self.name}-{index}" for index in range(self.count)]

    @property
    def like(self) -> shapes.InstanceType:
        """The instance type of the provider that has the pool's GPUs."""
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

    nodes: list[NodePool] = Field(default_factory=list)

    @model_validator(mode="after")
    def _names_are_unique(self) -> "ClusterSpec":
        names = [name for pool in self.nodes for name in pool.node_names()]
        doubles = sorted({name for name in names if names.count(name) > 1})
        if doubles:
            raise ValueError(f"two nodes would be called {doubles[0]}: give the pools different names")
        if len(names) > MAX_NODES:
            raise ValueError(f"{len(names)} nodes are too many for one machine: {MAX_NODES} is the limit")
        return self

    def pool_of_nodes(self) -> dict[str, NodePool]:
        """Every node's name and its pool, in the order that gives nodes their addresses."""
        return {name: pool for pool in self.nodes for name in pool.node_names()}


DEFAULT_SPEC = ClusterSpec(
    nodes=[
        NodePool(name=SYSTEM_POOL, gpus=0),
        NodePool(name="on-demand", count=2),
        NodePool(name="spot", count=4, capacity_type="spot"),
    ]
)


def load_spec(path: Path) -> ClusterSpec:
    """Read a cluster's nodes from YAML; raises LocalClusterError with a sentence per mistake.

    The file has one key, `nodes`, a list of pools; see `NodePool` for what a pool can say.
    """
    try:
        data = yaml.safe_load(path.read_text())
    except OSError as error:
        raise LocalClusterError(f"The file {path} can't be read: {error.strerror}.") from error
    except yaml.YAMLError as error:
        raise LocalClusterError(f"The file {path} is not YAML: {str(error).replace(chr(10), ' ')}.") from error
    if not isinstance(data, dict):
        raise LocalClusterError(f"The file {path} must have the key `nodes`, a list of node pools.")
    try:
        return ClusterSpec.model_validate(data)
    except ValidationError as error:
        mistakes = [_sentence(".".join(map(str, item["loc"])), item["msg"]) for item in error.errors()]
        raise LocalClusterError(f"The file {path} is wrong. " + " ".join(mistakes)) from error


def _sentence(where: str, what: str) -> str:
    what = re.sub(r"^(Value error, )", "", what)
    return f"{where or 'nodes'}: {what}."
