"""How a node's taints and labels announce when, and how, it is taken away."""

from __future__ import annotations

import pytest

from scene import NOW, training_job
from spottrain_api.contract import LABEL_SHUTDOWN_GRACE, TAINTS, NoticeKind, TaintMeaning, shutdown_grace_seconds
from spottrain_watcher.kubernetes_signals import node_notices


@pytest.mark.parametrize(
    ("labels", "seconds"),
    [
        ({}, None),
        ({"eks.amazonaws.com/capacityType": "SPOT"}, None),
        ({"cloud.google.com/gke-spot": "true"}, 15),
        ({"cloud.google.com/gke-preemptible": "true"}, 15),
        ({"cloud.google.com/gke-spot": "false"}, None),
        ({"cloud.google.com/gke-spot": "true", LABEL_SHUTDOWN_GRACE: "105"}, 105),
        ({"cloud.google.com/gke-spot": "true", LABEL_SHUTDOWN_GRACE: "soon"}, 15),
    ],
    ids=str,
)
def test_the_grace_of_a_nodes_shutdown(labels: dict[str, str], seconds: float | None) -> None:
    assert shutdown_grace_seconds(labels) == seconds


@pytest.mark.parametrize(("taint", "meaning"), TAINTS.items(), ids=TAINTS)
def test_the_operator_knows_each_taint_that_the_watcher_knows(taint: str, meaning: TaintMeaning) -> None:
    node = {"metadata": {"name": "n4"}, "spec": {"taints": [{"key": taint, "effect": "NoSchedule"}]}}
    [notice] = node_notices("n4", {"n4": node}, NOW)
    assert (notice.kind, (notice.deadline - NOW).total_seconds()) == (meaning.kind, meaning.lead_seconds)
    generation = training_job().node(4, taints=(taint,)).plan().status.generation
    assert generation is not None
    only_a_hint = meaning.kind is NoticeKind.REBALANCE
    assert generation.reason == (None if only_a_hint else "Preempted")
