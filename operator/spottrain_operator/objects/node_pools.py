"""The NodePools of Karpenter that a job's pools ask for: their manifests, and what they say. Pure."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from typing import Any

from spottrain_api.contract.names import (
    LABEL_CONTENT,
    LABEL_JOB,
    LABEL_JOB_UID,
    LABEL_MANAGED_BY,
    LABEL_NAMESPACE,
    MANAGED_BY,
)
from spottrain_api.contract.nodes import KARPENTER_CAPACITY_TYPE
from spottrain_api.v1alpha1.capacity import NodeClass, Pool
from spottrain_api.v1alpha1.pod_template import Toleration
from spottrain_api.v1alpha1.spec import TrainingJobSpec
from spottrain_operator.core.model import JobView
from spottrain_operator.core.node_pools import NodePoolView
from spottrain_operator.kube.resources import NODE_POOLS, Manifest

# The name of a NodePool is the value of a label of its nodes, of at most 63 characters.
_MOST_OF_JOB = 40
# An empty node stays this long, in case that the job's next generation needs it.
_IDLE = "5m"


def node_pools(job: JobView) -> dict[str, Manifest]:
    """The NodePools that the job's pools ask for, by name."""
    made = [_manifest(job, pool, pool.node_class) for pool in job.spec.capacity.pools if pool.node_class is not None]
    return {each["metadata"]["name"]: each for each in made}


def _manifest(job: JobView, pool: Pool, node_class: NodeClass) -> Manifest:
    spec = _spec(job.spec, pool, node_class)
    labels = {
        LABEL_MANAGED_BY: MANAGED_BY,
        LABEL_NAMESPACE: job.namespace,
        LABEL_JOB: job.name,
        LABEL_JOB_UID: job.uid,
        LABEL_CONTENT: _digest(spec),
    }
    return {
        "apiVersion": f"{NODE_POOLS.group}/{NODE_POOLS.version}",
        "kind": "NodePool",
        "metadata": {"name": _name(job, pool, node_class), "labels": labels},
        "spec": spec,
    }


def _name(job: JobView, pool: Pool, node_class: NodeClass) -> str:
    """A name of its own. Group and kind of the node class can't change in a NodePool that exists."""
    stem = job.name[:_MOST_OF_JOB].rstrip("-.")
    return f"{stem}-{_digest([job.uid, pool.name, node_class.group, node_class.kind])}"


def _spec(spec: TrainingJobSpec, pool: Pool, node_class: NodeClass) -> dict[str, Any]:
    labels = {KARPENTER_CAPACITY_TYPE: pool.capacity_type.value, **(pool.node_selector or {})}
    requirements = [{"key": key, "operator": "In", "values": [value]} for key, value in sorted(labels.items())]
    template: dict[str, Any] = {
        "nodeClassRef": {"group": node_class.group, "kind": node_class.kind, "name": node_class.name},
        "requirements": requirements,
        "expireAfter": "Never",  # the job ends, and its nodes with it
    }
    if taints := _taints(pool.tolerations):
        template["taints"] = taints
    made: dict[str, Any] = {
        "template": {"spec": template},
        "disruption": {"consolidationPolicy": "WhenEmpty", "consolidateAfter": _IDLE},
        "limits": {"nodes": str(_most_nodes(spec, pool))},
    }
    return made | ({"weight": pool.weight} if pool.weight else {})


def _taints(tolerations: Sequence[Toleration]) -> list[dict[str, str]]:
    """The taints that these tolerate. One that tolerates any key names none."""
    found = [
        {"key": each.key, "effect": each.effect or "NoSchedule"} | ({"value": each.value} if each.value else {})
        for each in tolerations
        if each.key
    ]
    return [each for number, each in enumerate(found) if each not in found[:number]]


def _most_nodes(spec: TrainingJobSpec, pool: Pool) -> int:
    """A bound, in case that others' pods also fit the nodes. A pool without weight gets no new nodes."""
    return spec.nodes.max + spec.capacity.spot.max_prewarmed if pool.weight else 0


def _digest(content: Any) -> str:
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()[:10]


def node_pool_view(node_pool: Manifest) -> NodePoolView:
    """Parse a NodePool that the operator has made."""
    meta, conditions = node_pool["metadata"], (node_pool.get("status") or {}).get("conditions") or ()
    not_ready = (each for each in conditions if each["type"] == "Ready" and each["status"] == "False")
    return NodePoolView(
        name=meta["name"],
        uid=meta["uid"],
        content=meta["labels"].get(LABEL_CONTENT, ""),
        not_ready=next((each.get("message") or each["reason"] for each in not_ready), ""),
    )


def trimmed_node_pool(node_pool: Manifest) -> Manifest:
    """What a cache keeps of it: what `node_pool_view` reads."""
    meta, status = node_pool["metadata"], node_pool.get("status") or {}
    kept = ("name", "uid", "resourceVersion", "labels", "deletionTimestamp")
    ready = [
        {key: each[key] for key in ("type", "status", "reason", "message") if key in each}
        for each in status.get("conditions") or ()
        if each["type"] == "Ready"
    ]
    return {"metadata": {key: meta[key] for key in kept if key in meta}, "status": {"conditions": ready}}
