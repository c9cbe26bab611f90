"""Which nodes have the labels that a pod asks for, and are kept from it."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from scene import notice, pod
from spottrain_api.contract.assignments import CapacityType
from spottrain_api.contract.names import ANNOTATION_NOTICE, TAINT_PREEMPTION
from spottrain_api.contract.nodes import GKE_SPOT, NOTICE_LABELS
from spottrain_operator.core.model import KeptAway
from spottrain_operator.kube.resources import Manifest
from spottrain_operator.objects.kept_away import kept_away, node_indices
from spottrain_operator.objects.placement import Site
from world.jobs import spec_of

SPOT = {GKE_SPOT: "true"}
NOTICE = notice(3).model_dump_json(by_alias=True)
CORDONED = "node.kubernetes.io/unschedulable"
SPOT_POD = replace(pod(3), node=None)
CUSTOM = {"name": "a", "capacityType": "spot", "provider": "custom", "nodeSelector": {"team": "a"}}
GKE = {"name": "floor", "capacityType": "on-demand", "provider": "gke"}


def node(*taints: str, labels: dict[str, str] | None = None, ready: bool = True, **more: Any) -> Manifest:
    return {
        "metadata": {"name": "n", "labels": SPOT if labels is None else labels} | more,
        "spec": {"taints": [dict(zip(("key", "effect"), taint.split(" "), strict=False)) for taint in taints]},
        "status": {"conditions": [{"type": "Ready", "status": str(ready)}]},
    }


def kept(*nodes: Manifest, **spec: Any) -> KeptAway:
    return kept_away([SPOT_POD], spec_of(**spec), nodes, Site())["u3"]


@pytest.mark.parametrize(
    ("found", "kept_from_it"),
    [
        (node(CORDONED), KeptAway(num_cordoned=1)),
        (node("team"), KeptAway(num_tainted=1, taints=frozenset({"team"}))),
        (node(CORDONED, "team"), KeptAway(num_tainted=1, taints=frozenset({"team"}))),
        (node("team PreferNoSchedule"), KeptAway()),
        (node(CORDONED, GKE_SPOT, "nvidia.com/gpu"), KeptAway(num_cordoned=1)),
        (node(CORDONED, labels={}), KeptAway()),
        (node("team", labels={"cloud.google.com/gke-nodepool": "system"}), KeptAway()),
        (node("node.kubernetes.io/unreachable"), KeptAway(num_down=1)),
        (node(CORDONED, TAINT_PREEMPTION), KeptAway(num_down=1)),
        (node(CORDONED, annotations={ANNOTATION_NOTICE: NOTICE}), KeptAway(num_down=1)),
        (node(CORDONED, labels=SPOT | dict.fromkeys(NOTICE_LABELS, "true")), KeptAway(num_down=1)),
        (node(CORDONED, ready=False), KeptAway(num_down=1)),
        (node("team", deletionTimestamp="2026-01-01T00:00:00Z"), KeptAway(num_down=1)),
    ],
    ids=[
        *("cordoned", "tainted", "both", "only avoided", "taints of spot nodes", "other labels", "on-demand"),
        *("unreachable", "with the watcher's taint", "with a notice", "labelled", "not ready", "deleted"),
    ],
)
def test_nodes_are_distinguished_by_what_keeps_them_from_the_pod(found: Manifest, kept_from_it: KeptAway) -> None:
    assert kept(found) == kept_from_it


@pytest.mark.parametrize(
    ("spec", "num_tainted"),
    [
        ({"podTemplate": {"tolerations": [{"key": "team", "operator": "Exists"}]}}, 0),
        ({"podTemplate": {"tolerations": [{"key": "other", "operator": "Exists"}]}}, 1),
        ({"podTemplate": {"nodeSelector": {"disk": "fast"}}}, 0),
    ],
    ids=["tolerated", "another taint", "labels of the job's own"],
)
def test_the_nodes_are_those_that_the_pod_template_asks_for(spec: dict[str, Any], num_tainted: int) -> None:
    assert kept(node("team"), **spec).num_tainted == num_tainted


def test_a_pool_asks_for_its_own_nodes() -> None:
    spec = spec_of(capacity={"pools": [CUSTOM, GKE]})
    system = {"cloud.google.com/gke-nodepool": "system"}
    nodes = [node(CORDONED, labels={"team": "a"}), node("team", labels=system), node("team", labels=system | SPOT)]
    floor = replace(SPOT_POD, uid="u4", capacity_type=CapacityType.ON_DEMAND, pool="floor")
    pods = [replace(SPOT_POD, pool="a"), floor, replace(SPOT_POD, uid="u5", pool="removed")]
    assert kept_away(pods, spec, nodes, Site()) == {
        "u3": KeptAway(num_cordoned=1),
        "u4": KeptAway(num_tainted=1, taints=frozenset({"team"})),
        "u5": KeptAway(),
    }


@pytest.mark.parametrize(
    ("taints", "found"),
    [((), False), ((GKE_SPOT, "nvidia.com/gpu"), False), (("team PreferNoSchedule",), False), ((CORDONED,), True)],
)
def test_nodes_with_the_taints_of_every_gpu_node_need_no_look(taints: tuple[str, ...], found: bool) -> None:
    assert bool(list(node_indices(node(*taints)))) == found
