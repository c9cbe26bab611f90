"""How many nodes a job has, and where they come from.

They come from on-demand and spot capacity and from pools, with a fallback.
"""

from __future__ import annotations

import re
from enum import StrEnum
from typing import Annotated

from pydantic import AwareDatetime, BeforeValidator, Field, WithJsonSchema

from spottrain_api.contract.assignments import CapacityType
from spottrain_api.settings.resource import Line, Resource
from spottrain_api.v1alpha1.containers import LabelValue
from spottrain_api.v1alpha1.pod_template import Toleration

MAX_MEMBERS = 512
# Above any price in any currency. Sums of such prices stay numbers, which a status can hold.
MAX_PRICE = 1e9


class Nodes(Resource):
    """How many nodes train together; one pod a node."""

    cel_rules = (
        ("self.min <= self.max", "nodes.min is larger than nodes.max; lower min or raise max"),
        (f"self.max <= {MAX_MEMBERS}", f"nodes.max is above {MAX_MEMBERS}, the most that one job can have; lower it"),
    )
    min: Annotated[
        int, Field(ge=1, description="Smallest number of nodes to train with. Below it the job waits.")
    ] = 1
    max: Annotated[int, Field(ge=1, description=f"Largest number of nodes to train with, at most {MAX_MEMBERS}.")]


_SHARE = re.compile(r"(100|[1-9]?[0-9])%")


def _read_count(value: object) -> object:
    """A number, or a share such as 25%; a number in quotes is a number."""
    if isinstance(value, str) and value.isdecimal():
        return int(value)
    is_count = isinstance(value, int) and not isinstance(value, bool) and value >= 0
    if is_count or (isinstance(value, str) and _SHARE.fullmatch(value)):
        return value
    raise ValueError(_NO_COUNT)


_NO_COUNT = "neither a whole number of 0 or more nor a share; write one such as 2 or 25%"
NodeCount = Annotated[
    int | str,
    BeforeValidator(_read_count),
    WithJsonSchema(
        {
            "maxLength": 10,
            "x-kubernetes-int-or-string": True,
            "x-kubernetes-validations": [
                {
                    "rule": "type(self) == int ? self >= 0 : self.matches('^([0-9]+|(100|[1-9]?[0-9])%)$')",
                    "message": _NO_COUNT,
                }
            ],
        }
    ),
]
"""A number of nodes, or a share of them."""


class OnDemandCapacity(Resource):
    """On-demand nodes: the floor, and how far a fallback may go above it."""

    cel_rules = (
        (
            "!has(self.max) || type(self.min) == string && self.min.endsWith('%') || int(self.min) <= self.max",
            "capacity.onDemand.min is larger than capacity.onDemand.max; lower min or raise max",
        ),
    )
    min: Annotated[
        NodeCount,
        Field(
            description="Number of on-demand nodes to ask for, or their share of nodes.max, rounded up, as in 25%. "
            "Only nodes.min is waited for."
        ),
    ] = 0
    max: Annotated[
        int | None,
        Field(
            ge=0,
            description="Largest number of on-demand nodes. More than min are used if spot is short, or if spot.max "
            "leaves too few nodes. Default: nodes.max.",
        ),
    ] = None
    price_per_hour: Annotated[
        float | None,
        Field(
            ge=0,
            le=MAX_PRICE,
            allow_inf_nan=False,
            description="Price of one on-demand node per hour, in capacity.currency, for status.cost. "
            "Default: that of the first on-demand pool with a price. Without one, on-demand nodes count as free, and "
            "the cost is not compared with theirs. If the job gives no price at all, and the currency is USD, dated "
            "list prices of common instances count.",
        ),
    ] = None

    def floor(self, num_nodes: int) -> int:
        """How many of so many nodes are to be on-demand."""
        if isinstance(self.min, int):
            return min(self.min, num_nodes)
        share = -(-int(self.min.removesuffix("%")) * num_nodes // 100)
        return share if self.max is None else min(share, self.max)


class SpotCapacity(Resource):
    """Spot nodes: what the job has above the on-demand floor."""

    max: Annotated[
        int | None,
        Field(
            ge=0,
            description="Largest number of spot nodes. With 0 the job is on-demand alone. "
            "Default: nodes.max less onDemand.min.",
        ),
    ] = None
    max_prewarmed: Annotated[
        int,
        Field(
            ge=0,
            description="Largest number of spot nodes beyond max and nodes.max, on which pods wait ready as "
            "replacements: one for each member whose node the cloud recommends to leave. They don't train, and cost "
            "as much as members.",
        ),
    ] = 0
    price_per_hour: Annotated[
        float | None,
        Field(
            ge=0,
            le=MAX_PRICE,
            allow_inf_nan=False,
            description="Price of one spot node per hour, in capacity.currency, for status.cost. "
            "Default: that of the first spot pool with a price. Without one, spot nodes count as free.",
        ),
    ] = None


class FallbackPolicy(StrEnum):
    """What to do if spot nodes are short.

    - OnDemand: on-demand pods take the place of spot pods, up to onDemand.max.
    - None: wait for spot nodes.
    """

    ON_DEMAND = "OnDemand"
    NONE = "None"


class Fallback(Resource):
    """What to do if spot pods wait too long for a node."""

    policy: FallbackPolicy = FallbackPolicy.ON_DEMAND
    after_seconds: Annotated[
        int,
        Field(
            ge=0,
            description="Seconds that a spot pod waits for a node before the fallback starts. Without one, and for "
            "on-demand pods, another pool of capacity.pools is tried then, after 300 seconds at the earliest.",
        ),
    ] = 300
    return_after_seconds: Annotated[
        int,
        Field(
            ge=1,
            description="Seconds from the start of a fallback until spot nodes are tried again. A job that doesn't "
            "train tries them once its on-demand pods have waited for afterSeconds, too.",
        ),
    ] = 900


class PoolType(StrEnum):
    """How a pool's nodes are bought.

    - on-demand: at the full price, and kept until they are given back.
    - spot: at a lower price, and taken back by the cloud at short notice.
    - reserved: paid already, as a capacity block or a reservation. They count as on-demand nodes, and come first.
    """

    ON_DEMAND = "on-demand"
    SPOT = "spot"
    RESERVED = "reserved"


class PoolProvider(StrEnum):
    """Service that runs the pool. Its labels identify the pool's nodes.

    - eks: an EKS managed node group (eks.amazonaws.com/capacityType).
    - karpenter: Karpenter (karpenter.sh/capacity-type).
    - gke: a GKE node pool (cloud.google.com/gke-spot and, of older pools, gke-preemptible).
    - aks: an AKS node pool (kubernetes.azure.com/scalesetpriority).
    - oke: an OKE node pool (oci.oraclecloud.com/oke-is-preemptible).
    - together: a Together GPU cluster (together.ai/compute-class).
    - custom: any other; nodeSelector alone identifies its nodes.
    """

    EKS = "eks"
    KARPENTER = "karpenter"
    GKE = "gke"
    AKS = "aks"
    OKE = "oke"
    TOGETHER = "together"
    CUSTOM = "custom"


class NodeClass(Resource):
    """A node class of Karpenter, which says what the cloud has to know of a node: its image, disks and network."""

    group: Annotated[
        str,
        Field(
            min_length=1,
            max_length=253,
            pattern=r"^[a-z0-9.-]+$",
            description="API group of the node class, such as karpenter.k8s.aws.",
        ),
    ]
    kind: Annotated[
        str, Field(min_length=1, max_length=63, description="Kind of the node class, such as EC2NodeClass.")
    ]
    name: Annotated[str, Field(min_length=1, max_length=253, description="Name of the node class.")]


class Pool(Resource):
    """A node pool to use, with its own weight and price.

    Of the pools of one type, those with the highest weight come first, and of these the cheapest. Equal ones take
    turns. A pod that waits too long for a node of one is replaced in another.
    """

    cel_rules = (
        (
            "self.provider != 'custom' || has(self.nodeSelector) && self.nodeSelector.size() > 0",
            "capacity.pools: a pool with provider custom needs a nodeSelector that finds its nodes",
        ),
        (
            "self.capacityType != 'reserved' || self.provider in ['eks', 'karpenter', 'gke'] || "
            "has(self.nodeSelector) && self.nodeSelector.size() > 0",
            "capacity.pools: a reserved pool needs a nodeSelector that finds its nodes, as this provider has no "
            "label for them",
        ),
        (
            "!has(self.nodeClass) || self.provider == 'karpenter'",
            "capacity.pools: a nodeClass is one of Karpenter; set the pool's provider to karpenter, or remove it",
        ),
    )
    name: Annotated[
        Line,
        Field(
            min_length=1,
            max_length=253,
            description="Name of the pool, for the pods' annotation spottrain.dev/pool. Two pools of a type can't "
            "have the same.",
        ),
    ]
    capacity_type: PoolType
    provider: PoolProvider
    node_selector: Annotated[
        dict[str, LabelValue] | None,
        Field(
            max_length=64,
            description="Labels that the pool's nodes have, beside those of the provider. Required if provider is "
            "custom. Default: those of the provider alone.",
        ),
    ] = None
    tolerations: Annotated[
        tuple[Toleration, ...],
        Field(max_length=16, description="Taints of the pool's nodes that the pods tolerate as well."),
    ] = ()
    price_per_hour: Annotated[
        float | None,
        Field(
            ge=0,
            le=MAX_PRICE,
            allow_inf_nan=False,
            description="Price of one node of the pool per hour, in capacity.currency. "
            "Default: the price of its capacity type; 0 if it is reserved.",
        ),
    ] = None
    weight: Annotated[
        int,
        Field(
            ge=0,
            le=100,
            description="Preference among the pools of its type: a higher weight comes first, whatever the price. "
            "With 0, it gets no new pods.",
        ),
    ] = 1
    node_class: Annotated[
        NodeClass | None,
        Field(
            description="Node class of Karpenter with which the operator makes a NodePool for the pool, and deletes "
            "it when the job ends. Its nodes have the labels of nodeSelector and the taints that tolerations name by "
            "their keys. Default: the nodes come from NodePools that others make."
        ),
    ] = None

    @property
    def kind(self) -> CapacityType:
        """The capacity type of its pods."""
        return CapacityType.SPOT if self.capacity_type is PoolType.SPOT else CapacityType.ON_DEMAND


# The pools of a type all have weight 0.
_UNUSED = "self.pools.exists(pool, {0}) && !self.pools.exists(pool, {0} && (!has(pool.weight) || pool.weight > 0))"
_KINDS = (("spot", "pool.capacityType == 'spot'"), ("on-demand and reserved", "pool.capacityType != 'spot'"))
# What holds of the pools of a job and of a profile.
POOL_RULES = (
    *(
        (
            f"!has(self.pools) || !({_UNUSED.format(of_kind)})",
            f"capacity.pools: all {kind} pools have weight 0, so that no pod could be placed; give one a weight "
            "of 1 or more",
        )
        for kind, of_kind in _KINDS
    ),
    (
        "!has(self.pools) || self.pools.all(a, self.pools.exists_one(b, a.name == b.name && "
        "(a.capacityType == 'spot') == (b.capacityType == 'spot')))",
        "capacity.pools: two pools of a type have the same name, and the second one's nodes and price would not "
        "count; rename one of them, or remove it",
    ),
)


class Capacity(Resource):
    """Where the nodes come from.

    Without `pools`, any node whose labels say that it is spot or on-demand (labels of EKS, Karpenter, GKE, AKS, OKE
    and Together are known).
    """

    cel_rules = (
        (
            "!has(self.finishBy) || !has(self.fallback) || !has(self.fallback.policy) || "
            "self.fallback.policy != 'None'",
            "capacity.finishBy needs on-demand nodes if there is no time left to wait for spot nodes, and "
            "capacity.fallback.policy None forbids them; remove one of them",
        ),
        (
            "!has(self.finishBy) || !has(self.pools) || self.pools.size() == 0 || "
            "self.pools.exists(pool, pool.capacityType != 'spot')",
            "capacity.finishBy needs on-demand nodes if there is no time left to wait for spot nodes, and "
            "capacity.pools has none; add an on-demand pool",
        ),
        *POOL_RULES,
    )

    on_demand: OnDemandCapacity = OnDemandCapacity()
    spot: SpotCapacity = SpotCapacity()
    fallback: Fallback = Fallback()
    pools: Annotated[
        tuple[Pool, ...],
        Field(
            max_length=16,
            description="Node pools to use, and no other nodes. Default: any node whose labels say how it is bought.",
        ),
    ] = ()
    finish_by: Annotated[
        AwareDatetime | None,
        Field(
            description="Time by which the job is to finish, for as little money as possible, as in "
            "2026-01-31T12:00:00Z. While there is time, the job waits for spot nodes; once there is none left, "
            "on-demand nodes stand in at once. Steps count, but not what a script does after its last one. "
            "Default: none, and fallback alone decides.",
            json_schema_extra={"maxLength": 64},
        ),
    ] = None
    currency: Annotated[
        str,
        Field(
            max_length=16,  # a bound of 3 would hide the pattern from who writes "euro"
            pattern=r"^[A-Z]{3}$",
            description="Currency of the prices and of the cost, as its ISO 4217 code. If it is edited, the cost "
            "starts anew at 0.",
        ),
    ] = "USD"
