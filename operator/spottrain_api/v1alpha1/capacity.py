"""How many nodes a job has, and where they come from: on-demand and spot, pools, fallback."""

from __future__ import annotations

from enum import StrEnum
from typing import Annotated

from pydantic import Field

from ..contract import CapacityType
from .pod_template import Toleration
from .resource import Resource

MAX_MEMBERS = 512


class Nodes(Resource):
    """How many nodes train together; one pod a node."""

    cel_rules = (
        ("self.min <= self.max", "nodes.min is larger than nodes.max; lower min or raise max"),
        (f"self.max <= {MAX_MEMBERS}", f"nodes.max is above {MAX_MEMBERS}, the most that one job can have"),
    )
    min: Annotated[int, Field(ge=1)] = 1
    max: Annotated[int, Field(ge=1)]


class OnDemandCapacity(Resource):
    """The floor: `min` nodes are always on-demand; up to `max` where spot falls back (default: nodes.max)."""

    cel_rules = (
        (
            "!has(self.max) || self.min <= self.max",
            "capacity.onDemand.min is larger than capacity.onDemand.max; lower min or raise max",
        ),
    )
    min: Annotated[int, Field(ge=0)] = 0
    max: Annotated[int | None, Field(ge=0)] = None
    price_per_hour: Annotated[float | None, Field(ge=0, description="Price of one node, in any currency.")] = None


class SpotCapacity(Resource):
    """The surplus: at most `max` spot nodes (default: nodes.max)."""

    max: Annotated[int | None, Field(ge=0)] = None
    price_per_hour: Annotated[float | None, Field(ge=0, description="Price of one node, in any currency.")] = None


class FallbackPolicy(StrEnum):
    ON_DEMAND = "OnDemand"
    NONE = "None"


class Fallback(Resource):
    """When spot pods have waited `afterSeconds` for a node, on-demand pods take their place, up to
    capacity.onDemand.max; `returnAfterSeconds` later spot is tried again."""

    policy: FallbackPolicy = FallbackPolicy.ON_DEMAND
    after_seconds: Annotated[int, Field(ge=0)] = 300
    return_after_seconds: Annotated[int, Field(ge=1)] = 900


class PoolProvider(StrEnum):
    EKS = "eks"
    KARPENTER = "karpenter"
    GKE = "gke"
    AKS = "aks"
    CUSTOM = "custom"


class Pool(Resource):
    """A node pool to use, with its own price. A custom pool is found by its nodeSelector alone."""

    cel_rules = (
        (
            "self.provider != 'custom' || has(self.nodeSelector)",
            "capacity.pools: a pool with provider custom needs a nodeSelector that finds its nodes",
        ),
    )
    name: Annotated[str, Field(min_length=1)]
    capacity_type: CapacityType
    provider: PoolProvider
    node_selector: dict[str, str] | None = None
    tolerations: Annotated[tuple[Toleration, ...], Field(max_length=16)] = ()
    price_per_hour: Annotated[float | None, Field(ge=0)] = None


class Capacity(Resource):
    """Where the nodes come from. Without `pools`, any node whose labels say that it is spot or on-demand
    (EKS, Karpenter, GKE and AKS labels are known)."""

    on_demand: OnDemandCapacity = OnDemandCapacity()
    spot: SpotCapacity = SpotCapacity()
    fallback: Fallback = Fallback()
    pools: Annotated[tuple[Pool, ...], Field(max_length=16)] = ()
