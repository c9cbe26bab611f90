"""Where a pod may run: affinity and tolerations for spot and on-demand nodes.

A node takes one pod, and a job stays in one zone.

The labels and taints are those of EKS managed node groups, Karpenter, GKE, AKS, OKE and Together. GKE, AKS and OKE
mark only spot nodes. So an on-demand node there has the provider's label, but no spot mark.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from spottrain_api.contract.assignments import CapacityType
from spottrain_api.contract.names import LABEL_JOB_UID, WATCHER_PORT
from spottrain_api.contract.nodes import (
    AKS_PRIORITY,
    EKS_CAPACITY_TYPE,
    EKS_TEMPLATE_CAPACITY_TYPE,
    GKE_COMPUTE_CLASS,
    GKE_PREEMPTIBLE,
    GKE_SPOT,
    KARPENTER_CAPACITY_TYPE,
    OKE_PREEMPTIBLE,
    SPOT_LABELS,
    TOGETHER_COMPUTE_CLASS,
)
from spottrain_api.v1alpha1.capacity import Pool, PoolProvider, PoolType
from spottrain_api.v1alpha1.pod_template import Network, PodTemplate, SameZone
from spottrain_api.v1alpha1.spec import TrainingJobSpec
from spottrain_runtime.logs import LogFormat

Expression = dict[str, Any]
Term = tuple[Expression, ...]


def _in(key: str, *values: str) -> Expression:
    return {"key": key, "operator": "In", "values": list(values)}


def _not_in(key: str, *values: str) -> Expression:
    return {"key": key, "operator": "NotIn", "values": list(values)}


def _exists(key: str) -> Expression:
    return {"key": key, "operator": "Exists"}


def _spot(*keys: str) -> tuple[Term, ...]:
    """A term for each of these labels of spot nodes."""
    return tuple((_in(key, SPOT_LABELS[key]),) for key in keys)


def _no_spot(*keys: str) -> Term:
    return tuple(_not_in(key, SPOT_LABELS[key]) for key in keys)


# Any of the terms is enough. A term that only excludes labels fits nodes of other clouds, too: it is for pools alone.
TERMS: dict[tuple[PoolProvider, PoolType], tuple[Term, ...]] = {
    (PoolProvider.EKS, PoolType.SPOT): _spot(EKS_CAPACITY_TYPE),
    (PoolProvider.EKS, PoolType.ON_DEMAND): ((_in(EKS_CAPACITY_TYPE, "ON_DEMAND"),),),
    (PoolProvider.KARPENTER, PoolType.SPOT): _spot(KARPENTER_CAPACITY_TYPE),
    (PoolProvider.KARPENTER, PoolType.ON_DEMAND): ((_in(KARPENTER_CAPACITY_TYPE, "on-demand", "reserved"),),),
    (PoolProvider.EKS, PoolType.RESERVED): ((_in(EKS_CAPACITY_TYPE, "CAPACITY_BLOCK"),),),
    (PoolProvider.KARPENTER, PoolType.RESERVED): ((_in(KARPENTER_CAPACITY_TYPE, "reserved"),),),
    (PoolProvider.GKE, PoolType.RESERVED): ((_exists("cloud.google.com/reservation-name"),),),
    (PoolProvider.GKE, PoolType.SPOT): _spot(GKE_SPOT, GKE_PREEMPTIBLE),
    (PoolProvider.GKE, PoolType.ON_DEMAND): (
        (_exists("cloud.google.com/gke-nodepool"), *_no_spot(GKE_SPOT, GKE_PREEMPTIBLE)),
    ),
    (PoolProvider.AKS, PoolType.SPOT): _spot(AKS_PRIORITY),
    (PoolProvider.AKS, PoolType.ON_DEMAND): ((_exists("kubernetes.azure.com/agentpool"), *_no_spot(AKS_PRIORITY)),),
    (PoolProvider.OKE, PoolType.SPOT): _spot(OKE_PREEMPTIBLE),
    (PoolProvider.OKE, PoolType.ON_DEMAND): (
        (_exists("oci.oraclecloud.com/fault-domain"), *_no_spot(OKE_PREEMPTIBLE)),
    ),
    (PoolProvider.TOGETHER, PoolType.SPOT): _spot(TOGETHER_COMPUTE_CLASS),
    (PoolProvider.TOGETHER, PoolType.ON_DEMAND): (_no_spot(TOGETHER_COMPUTE_CLASS),),
}

# What an autoscaler says of nodes that it could make, where it differs from what they say once they are there.
# Without these terms, a group without a node would never get one.
TEMPLATES: dict[tuple[PoolProvider, PoolType], tuple[Term, ...]] = {
    (PoolProvider.EKS, kind): ((_in(EKS_TEMPLATE_CAPACITY_TYPE, value),),)
    for kind, value in (
        (PoolType.SPOT, "SPOT"),
        (PoolType.ON_DEMAND, "ON_DEMAND"),
        (PoolType.RESERVED, "CAPACITY_BLOCK"),
    )
}

# Most providers taint GPU nodes.
GPU_TOLERATION = {"key": "nvidia.com/gpu", "operator": "Exists", "effect": "NoSchedule"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Site:
    """What the cluster's administrator says, for all jobs.

    Attributes:
        spot_labels: Labels of spot nodes, with their values, beside those that are known.
        watcher_port: Port of the watcher on each of them.
        allowed_networks: Values of podTemplate.network that jobs may ask for.
        uses_kueue: Whether jobs may wait in queues of Kueue.
        uses_karpenter: Whether the operator makes NodePools of Karpenter for pools that name a node class.
        groups_pods: Whether each job gets a PodGroup.
        isolates_jobs: Whether each job gets a NetworkPolicy.
        assigns_ids: Whether the cluster gives pods user and group ids of their namespace, as OpenShift does.
        log_format: Form of the log lines of trainer pods.
    """

    spot_labels: Mapping[str, str] = field(default_factory=dict)
    watcher_port: int = WATCHER_PORT
    allowed_networks: frozenset[Network] = frozenset()
    uses_kueue: bool = False
    uses_karpenter: bool = False
    groups_pods: bool = False
    isolates_jobs: bool = False
    assigns_ids: bool = False
    log_format: LogFormat = LogFormat.TEXT


DEFAULT_SITE = Site()


def affinity(
    spec: TrainingJobSpec,
    capacity_type: CapacityType,
    pool: str | None,
    *,
    job_uid: str,
    avoided: Sequence[str] = (),
    site: Site = DEFAULT_SITE,
) -> dict[str, Any]:
    """Affinity of a pod to nodes of its capacity type.

    It also keeps the pod away from the nodes `avoided` and from the job's other pods, and in their zone.

    Raises:
        ValueError: The job has pools, but none of this type.
    """
    siblings = {"labelSelector": {"matchLabels": {LABEL_JOB_UID: job_uid}}}
    away = {**siblings, "topologyKey": "kubernetes.io/hostname"}
    return {
        "nodeAffinity": _without(avoided, node_affinity(spec, capacity_type, pool, site)),
        "podAntiAffinity": {"requiredDuringSchedulingIgnoredDuringExecution": [away]},
        **_zone(spec.pod_template, {**siblings, "topologyKey": "topology.kubernetes.io/zone"}),
    }


def _without(avoided: Sequence[str], affinity: dict[str, Any]) -> dict[str, Any]:
    """The node affinity, without nodes of these names."""
    if not avoided:
        return affinity
    not_these = [{"key": "metadata.name", "operator": "NotIn", "values": [name]} for name in avoided]
    required = affinity["requiredDuringSchedulingIgnoredDuringExecution"]
    terms = [{**term, "matchFields": not_these} for term in required["nodeSelectorTerms"]]
    return {**affinity, "requiredDuringSchedulingIgnoredDuringExecution": {**required, "nodeSelectorTerms": terms}}


# Networks of clouds that don't reach beyond a zone. Nodes outside of clouds often have no zone at all.
_OF_ONE_ZONE = frozenset({Network.EFA, Network.TCPX})


def _zone(template: PodTemplate, same_zone: dict[str, Any]) -> dict[str, Any]:
    """The affinity to the zone of the job's other pods."""
    default = SameZone.REQUIRED if template.network in _OF_ONE_ZONE else SameZone.PREFERRED
    match template.same_zone or default:
        case SameZone.REQUIRED:
            return {"podAffinity": {"requiredDuringSchedulingIgnoredDuringExecution": [same_zone]}}
        case SameZone.PREFERRED:
            preferred = [{"weight": 100, "podAffinityTerm": same_zone}]
            return {"podAffinity": {"preferredDuringSchedulingIgnoredDuringExecution": preferred}}
        case SameZone.IGNORED | SameZone.SPREAD:
            return {}


def spread(template: PodTemplate, *, job_uid: str) -> list[dict[str, Any]]:
    """The spread of a job's pods over zones, if it asks for that. It keeps no pod waiting."""
    if template.same_zone is not SameZone.SPREAD:
        return []
    return [
        {
            "maxSkew": 1,
            "topologyKey": "topology.kubernetes.io/zone",
            "whenUnsatisfiable": "ScheduleAnyway",
            "labelSelector": {"matchLabels": {LABEL_JOB_UID: job_uid}},
        }
    ]


def node_affinity(
    spec: TrainingJobSpec, capacity_type: CapacityType, pool: str | None, site: Site = DEFAULT_SITE
) -> dict[str, Any]:
    """Required node affinity of a pod.

    Any of these terms is enough: those of `pool`, or of all pools of the capacity type if `pool` is None, or of all
    providers, and of the site, if the job has no pools.

    Raises:
        ValueError: The job has pools, but none of this type.
    """
    pools = _pools(spec, capacity_type, pool)
    if spec.capacity.pools:
        terms = [term for each in pools for term in _pool_terms(each)]
    else:
        terms = _terms_of_all(capacity_type, site)
    if not terms:
        limit = "onDemand.min" if capacity_type is CapacityType.ON_DEMAND else "spot.max"
        raise ValueError(
            f"capacity.pools has no pool for {capacity_type.value} nodes; add one, or set capacity.{limit} to 0"
        )
    required = {"nodeSelectorTerms": [{"matchExpressions": list(term)} for term in terms]}
    return {"requiredDuringSchedulingIgnoredDuringExecution": required}


def of_nodes(affinity: Mapping[str, Any]) -> dict[str, Any]:
    """The node affinity without the terms for nodes that an autoscaler makes up.

    Kueue takes a term without any label of its flavors for one that fits them all.
    """
    made_up = [each for terms in TEMPLATES.values() for term in terms for each in term]
    required = affinity["requiredDuringSchedulingIgnoredDuringExecution"]
    terms = [
        term
        for term in required["nodeSelectorTerms"]
        if not any(each in made_up for each in term["matchExpressions"])
    ]
    return {**affinity, "requiredDuringSchedulingIgnoredDuringExecution": {**required, "nodeSelectorTerms": terms}}


def tolerations(
    spec: TrainingJobSpec, capacity_type: CapacityType, pool: str | None, site: Site = DEFAULT_SITE
) -> list[dict[str, Any]]:
    """Tolerations for GPU and spot taints, and those of pools and the podTemplate.

    Only spot pods tolerate spot taints. GKE, AKS and OKE taint spot nodes with the key of their label. Elsewhere,
    whoever sets up the nodes does. GKE taints the nodes of a ComputeClass with the label by which a pool names it.
    """
    result: list[dict[str, Any]] = [GPU_TOLERATION]
    if capacity_type is CapacityType.SPOT:
        result += [
            {"key": key, "operator": "Exists", "effect": "NoSchedule"} for key in (*SPOT_LABELS, *site.spot_labels)
        ]
    for each in _pools(spec, capacity_type, pool):
        if (compute_class := (each.node_selector or {}).get(GKE_COMPUTE_CLASS)) is not None:
            taint = {"key": GKE_COMPUTE_CLASS, "value": compute_class, "effect": "NoSchedule"}
            result.append(taint | {"operator": "Equal"})
        result += [toleration.to_dict() for toleration in each.tolerations]
    result += [toleration.to_dict() for toleration in spec.pod_template.tolerations]
    return result


def fits(expression: Expression, labels: Mapping[str, str]) -> bool:
    """Whether a node's labels meet a requirement of a node affinity.

    They don't meet one that compares numbers, Gt or Lt: nothing here asks for that.
    """
    value = labels.get(expression["key"])
    values: list[str] = expression.get("values", [])
    match expression["operator"]:
        case "In":
            return value in values
        case "NotIn":
            return value not in values
        case "Exists":
            return value is not None
        case "DoesNotExist":
            return value is None
    return False


def _pools(spec: TrainingJobSpec, capacity_type: CapacityType, pool: str | None) -> list[Pool]:
    return [
        each for each in spec.capacity.pools if each.kind is capacity_type and (pool is None or each.name == pool)
    ]


def _pool_terms(pool: Pool) -> list[Term]:
    own = tuple(_in(key, value) for key, value in sorted((pool.node_selector or {}).items()))
    key = (pool.provider, pool.capacity_type)
    return [preset + own for preset in (*TERMS.get(key, ((),)), *TEMPLATES.get(key, ()))]


def _terms_of_all(capacity_type: CapacityType, site: Site) -> list[Term]:
    """Terms of all providers, and of the site's own labels.

    With these, no other label makes a node on-demand.
    """
    known = [
        term
        for (_, kind), terms in (*TERMS.items(), *TEMPLATES.items())
        for term in terms
        if kind == capacity_type.value and any(each["operator"] != "NotIn" for each in term)
    ]
    if capacity_type is CapacityType.SPOT:
        return known + [(_in(key, value),) for key, value in site.spot_labels.items()]
    others = tuple(_not_in(key, value) for key, value in site.spot_labels.items())
    return [term + others for term in known]
