"""Where a pod may run: affinity and tolerations for spot and on-demand nodes, one pod a node, one zone a job.

The labels and taints are those of EKS managed node groups, Karpenter, GKE and AKS. GKE and AKS mark only spot nodes.
So an on-demand node there has the provider's label, but no spot mark.
"""

from __future__ import annotations

from typing import Any

from spottrain_api.contract import GKE_PREEMPTIBLE, GKE_SPOT, LABEL_JOB_UID, CapacityType
from spottrain_api.v1alpha1 import Network, PodTemplate, Pool, PoolProvider, SameZone, TrainingJobSpec

Expression = dict[str, Any]
Term = tuple[Expression, ...]


def _in(key: str, *values: str) -> Expression:
    return {"key": key, "operator": "In", "values": list(values)}


def _not_in(key: str, *values: str) -> Expression:
    return {"key": key, "operator": "NotIn", "values": list(values)}


def _exists(key: str) -> Expression:
    return {"key": key, "operator": "Exists"}


EKS_CAPACITY_TYPE = "eks.amazonaws.com/capacityType"
KARPENTER_CAPACITY_TYPE = "karpenter.sh/capacity-type"
AKS_PRIORITY = "kubernetes.azure.com/scalesetpriority"

TERMS: dict[tuple[PoolProvider, CapacityType], Term] = {
    (PoolProvider.EKS, CapacityType.SPOT): (_in(EKS_CAPACITY_TYPE, "SPOT"),),
    (PoolProvider.EKS, CapacityType.ON_DEMAND): (_in(EKS_CAPACITY_TYPE, "ON_DEMAND"),),
    (PoolProvider.KARPENTER, CapacityType.SPOT): (_in(KARPENTER_CAPACITY_TYPE, "spot"),),
    (PoolProvider.KARPENTER, CapacityType.ON_DEMAND): (_in(KARPENTER_CAPACITY_TYPE, "on-demand", "reserved"),),
    (PoolProvider.GKE, CapacityType.SPOT): (_in(GKE_SPOT, "true"),),
    (PoolProvider.GKE, CapacityType.ON_DEMAND): (
        _exists("cloud.google.com/gke-nodepool"),
        _not_in(GKE_SPOT, "true"),
        _not_in(GKE_PREEMPTIBLE, "true"),
    ),
    (PoolProvider.AKS, CapacityType.SPOT): (_in(AKS_PRIORITY, "spot"),),
    (PoolProvider.AKS, CapacityType.ON_DEMAND): (
        _exists("kubernetes.azure.com/agentpool"),
        _not_in(AKS_PRIORITY, "spot"),
    ),
}

# GKE and AKS taint spot nodes themselves. On the other two, whoever sets up the nodes does, usually with these keys.
# Most providers taint GPU nodes.
SPOT_TAINTS = (
    (GKE_SPOT, "true"),
    (AKS_PRIORITY, "spot"),
    (KARPENTER_CAPACITY_TYPE, "spot"),
    (EKS_CAPACITY_TYPE, "SPOT"),
)
GPU_TOLERATION = {"key": "nvidia.com/gpu", "operator": "Exists", "effect": "NoSchedule"}


def affinity(spec: TrainingJobSpec, capacity_type: CapacityType, pool: str | None, *, job_uid: str) -> dict[str, Any]:
    """Affinity of a pod: to nodes of its capacity type, away from the job's other pods, and to their zone.

    Raises:
        ValueError: The job has pools, but none of this type.
    """
    siblings = {"labelSelector": {"matchLabels": {LABEL_JOB_UID: job_uid}}}
    away = {**siblings, "topologyKey": "kubernetes.io/hostname"}
    return {
        "nodeAffinity": node_affinity(spec, capacity_type, pool),
        "podAntiAffinity": {"requiredDuringSchedulingIgnoredDuringExecution": [away]},
        **_zone(spec.pod_template, {**siblings, "topologyKey": "topology.kubernetes.io/zone"}),
    }


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
        case SameZone.IGNORED:
            return {}


def node_affinity(spec: TrainingJobSpec, capacity_type: CapacityType, pool: str | None) -> dict[str, Any]:
    """Required node affinity of a pod.

    Any of these terms is enough: those of `pool`, or of all pools of the capacity type if `pool` is None, or of all
    providers if the job has no pools.

    Raises:
        ValueError: The job has pools, but none of this type.
    """
    pools = _pools(spec, capacity_type, pool)
    if spec.capacity.pools:
        terms = [_pool_term(each) for each in pools]
    else:
        terms = [term for (_, kind), term in TERMS.items() if kind == capacity_type]
    if not terms:
        raise ValueError(
            f"capacity.pools has no pool for {capacity_type.value} nodes; add one, or set the maximum to 0"
        )
    required = {"nodeSelectorTerms": [{"matchExpressions": list(term)} for term in terms]}
    return {"requiredDuringSchedulingIgnoredDuringExecution": required}


def tolerations(spec: TrainingJobSpec, capacity_type: CapacityType, pool: str | None) -> list[dict[str, Any]]:
    """Tolerations for the GPU taint, for spot taints (spot pods only), and those of the pools and the podTemplate."""
    result: list[dict[str, Any]] = [GPU_TOLERATION]
    if capacity_type is CapacityType.SPOT:
        result += [
            {"key": key, "operator": "Equal", "value": value, "effect": "NoSchedule"} for key, value in SPOT_TAINTS
        ]
    for each in _pools(spec, capacity_type, pool):
        result += [toleration.to_dict() for toleration in each.tolerations]
    result += [toleration.to_dict() for toleration in spec.pod_template.tolerations]
    return result


def _pools(spec: TrainingJobSpec, capacity_type: CapacityType, pool: str | None) -> list[Pool]:
    return [
        each
        for each in spec.capacity.pools
        if each.capacity_type is capacity_type and (pool is None or each.name == pool)
    ]


def _pool_term(pool: Pool) -> Term:
    preset = TERMS.get((pool.provider, pool.capacity_type), ())
    return preset + tuple(_in(key, value) for key, value in sorted((pool.node_selector or {}).items()))
