"""The nodes that capacity.pools names, and which pods ask for them."""

from __future__ import annotations

import hashlib
import json

from spottrain_api.contract.assignments import CapacityType
from spottrain_api.v1alpha1.capacity import Pool, PoolProvider
from spottrain_api.v1alpha1.spec import TrainingJobSpec
from spottrain_operator.core.model import PodView

# What decides on which nodes a pod of the pool may run, beside the capacity type.
_OF_PLACEMENT = {"provider", "node_selector", "tolerations"}


def pools_have(spec: TrainingJobSpec, capacity_type: CapacityType) -> bool:
    """Whether the job's pools have nodes of a type.

    Without pools, any node of the cluster will do.
    """
    pools = spec.capacity.pools
    return not pools or any(pool.kind is capacity_type for pool in pools)


def pool_hash(spec: TrainingJobSpec, capacity_type: CapacityType, name: str | None) -> str | None:
    """Hash of what the pool says about its nodes; None if there is no such pool.

    Defaults are left out, as in the hash of the pod template. Pools of one name and type count as one.
    """
    found = _pools(spec, capacity_type, name)
    content = [pool.model_dump(mode="json", include=_OF_PLACEMENT, exclude_defaults=True) for pool in found]
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()[:10] if content else None


def asks_for_current_nodes(pod: PodView, spec: TrainingJobSpec) -> bool:
    """Whether `pod` asks for nodes as the job's pools are now.

    If the job has no pools, it asks for any nodes.
    """
    if pod.pool is None:
        return not spec.capacity.pools
    current = pool_hash(spec, pod.capacity_type, pod.pool)
    return current is not None and pod.pool_hash == current


def pool_sentence(pod: PodView, spec: TrainingJobSpec) -> str:
    """Which nodes the pod's pool asks for; empty without a pool."""
    found = _pools(spec, pod.capacity_type, pod.pool)
    return f"Pool {pod.pool} asks for {' or '.join(_nodes_of(pool) for pool in found)}" if found else ""


def _nodes_of(pool: Pool) -> str:
    labels = ", ".join(f"{key}={value}" for key, value in sorted((pool.node_selector or {}).items()))
    if pool.provider is PoolProvider.CUSTOM:
        return labels
    return f"{pool.capacity_type.value} nodes of {pool.provider.value}{' with ' if labels else ''}{labels}"


def _pools(spec: TrainingJobSpec, capacity_type: CapacityType, name: str | None) -> list[Pool]:
    return [pool for pool in spec.capacity.pools if pool.name == name and pool.kind is capacity_type]
