"""Nodes that have the labels that a pod asks for, and taints that keep it away."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from spottrain_api.contract.nodes import SPOT_LABELS, accepted_taints
from spottrain_api.v1alpha1.spec import TrainingJobSpec
from spottrain_operator.core.facts.notices import loss_marks
from spottrain_operator.core.model import KeptAway, PodView
from spottrain_operator.kube.cache import Index
from spottrain_operator.kube.resources import Manifest
from spottrain_operator.objects.observe import node_view
from spottrain_operator.objects.placement import GPU_TOLERATION, Site, fits, node_affinity, tolerations

TAINTED = ("tainted",)
_CORDONED = "node.kubernetes.io/unschedulable"
# Taints of nodes that come up or go.
_OF_KUBERNETES = ("node.kubernetes.io/", "node.cloudprovider.kubernetes.io/")
# Taints of nodes for these very pods.
_USUAL = frozenset({GPU_TOLERATION["key"], *SPOT_LABELS})


def node_indices(node: Manifest) -> Iterable[Index]:
    """A node is found by having a taint that may keep a pod of its labels away."""
    if not _taints(node) <= _USUAL:
        yield TAINTED


def kept_away(
    pods: Sequence[PodView], spec: TrainingJobSpec, nodes: Sequence[Manifest], site: Site
) -> dict[str, KeptAway]:
    """The nodes that are kept from each of the pods, by the pod's uid."""
    found: dict[tuple[str, str | None], KeptAway] = {}
    for pod in pods:
        asks = (pod.capacity_type, pod.pool)
        if asks not in found:
            found[asks] = _kept_from(pod, spec, nodes, site)
    return {pod.uid: found[pod.capacity_type, pod.pool] for pod in pods}


def _kept_from(pod: PodView, spec: TrainingJobSpec, nodes: Sequence[Manifest], site: Site) -> KeptAway:
    try:
        affinity = node_affinity(spec, pod.capacity_type, pod.pool, site)
    except ValueError:  # its pool was removed
        return KeptAway()
    terms = affinity["requiredDuringSchedulingIgnoredDuringExecution"]["nodeSelectorTerms"]
    tolerated = tolerations(spec, pod.capacity_type, pod.pool, site)
    num_cordoned = num_tainted = num_down = 0
    keys: set[str] = set()
    for node in nodes:
        labels = node["metadata"].get("labels") or {}
        if not spec.pod_template.node_selector.items() <= labels.items():
            continue
        if not any(all(fits(each, labels) for each in term["matchExpressions"]) for term in terms):
            continue
        taints = {key for key in _taints(node) if not any(_tolerates(each, key) for each in tolerated)}
        if _is_down(node, taints):
            num_down += 1
        elif taints == {_CORDONED}:
            num_cordoned += 1
        elif taints:
            num_tainted += 1
            keys |= taints - {_CORDONED}
    return KeptAway(num_cordoned=num_cordoned, num_tainted=num_tainted, num_down=num_down, taints=frozenset(keys))


def _taints(node: Manifest) -> set[str]:
    return {taint["key"] for taint in accepted_taints(node) if taint.get("effect") != "PreferNoSchedule"}


def _is_down(node: Manifest, taints: set[str]) -> bool:
    """Whether the node goes, or is not up yet."""
    view = node_view(node)
    passing = any(each.startswith(_OF_KUBERNETES) for each in taints - {_CORDONED})
    goes = view.deleting or view.notice is not None or bool(loss_marks(view.taints, view.labels))
    return not view.ready or passing or goes


def _tolerates(toleration: Mapping[str, Any], key: str) -> bool:
    """Whether it may tolerate a taint with this key: the cache keeps no values."""
    return toleration.get("key") in (None, "", key)
