"""How a node's taints and labels announce when, and how, it is taken away."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import pytest

from scene import NOW, training_job
from spottrain_api.contract.nodes import (
    GKE_PREEMPTIBLE,
    GKE_SPOT,
    LABEL_SHUTDOWN_GRACE,
    NOTICE_LABELS,
    TAINTS,
    MarkMeaning,
    shutdown_grace_seconds,
)
from spottrain_api.contract.notices import NoticeKind
from spottrain_operator.core.timing import DEFAULT_TIMING
from spottrain_operator.objects.observe import node_view, pod_view
from spottrain_watcher.kubernetes_signals import node_notices, pod_notices
from spottrain_watcher.node_marker import desired_change


@pytest.mark.parametrize(
    ("labels", "seconds"),
    [
        ({}, None),
        ({"eks.amazonaws.com/capacityType": "SPOT"}, None),
        ({"cloud.google.com/gke-spot": "true"}, 15),
        ({"cloud.google.com/gke-preemptible": "true"}, 15),
        ({"cloud.google.com/gke-spot": "false"}, None),
        ({"cloud.google.com/gke-spot": "true", LABEL_SHUTDOWN_GRACE: "105"}, 105),
        *(
            ({"cloud.google.com/gke-spot": "true", LABEL_SHUTDOWN_GRACE: odd}, 15)
            for odd in ("soon", "", "-5", "1.5", "1e9", "inf", "nan", "²", "86401", "9" * 12, "9" * 63)
        ),
        ({LABEL_SHUTDOWN_GRACE: "86400"}, 86_400),
        ({LABEL_SHUTDOWN_GRACE: "9" * 63}, None),
    ],
    ids=str,
)
def test_the_grace_of_a_nodes_shutdown(labels: dict[str, str], seconds: float | None) -> None:
    assert shutdown_grace_seconds(labels) == seconds


@pytest.mark.parametrize(("taint", "meaning"), TAINTS.items(), ids=TAINTS)
def test_the_operator_knows_each_taint_that_the_watcher_knows(taint: str, meaning: MarkMeaning) -> None:
    node = {"metadata": {"name": "n4"}, "spec": {"taints": [{"key": taint, "effect": "NoSchedule"}]}}
    [notice] = node_notices("n4", {"n4": node}, NOW)
    assert (notice.kind, (notice.deadline - NOW).total_seconds()) == (meaning.kind, meaning.lead_seconds)
    generation = training_job().node(4, taints=(taint,)).plan().status.generation
    assert generation is not None
    only_a_hint = meaning.kind is NoticeKind.REBALANCE
    assert generation.reason == (None if only_a_hint else "Preempted")
    # A deadline that has passed counts as unknown: the node is still there.
    due = notice.deadline if meaning.lead_seconds else NOW + timedelta(seconds=DEFAULT_TIMING.unknown_lead)
    assert generation.deadline == (None if only_a_hint else due)


@pytest.mark.parametrize(("label", "meaning"), NOTICE_LABELS.items(), ids=NOTICE_LABELS)
def test_watcher_and_operator_know_each_label_that_announces_a_loss(label: str, meaning: MarkMeaning) -> None:
    """CoreWeave cordons a node and labels it. A cordon alone says nothing."""
    for labels, announced in (({label: "true"}, True), ({label: "false"}, False), ({}, False)):
        node = tainted({"key": "node.kubernetes.io/unschedulable", "effect": "NoSchedule"})
        node["metadata"]["labels"] = labels
        notices = node_notices("n4", {"n4": node}, NOW)
        due = NOW + timedelta(seconds=meaning.lead_seconds)
        expected = [(f"label:{label}", meaning.kind, due)] if announced else []
        assert [(each.source, each.kind, each.deadline) for each in notices] == expected
        view = node_view(node)
        generation = training_job().node(4, taints=view.taints, labels=view.labels).plan().status.generation
        assert generation is not None
        assert (generation.reason, generation.deadline) == (("Preempted", due) if announced else (None, None))


@pytest.mark.parametrize(("stated", "seconds"), [("105", 105), ("soon", 15)])
def test_a_node_that_shuts_down_has_what_its_label_says(stated: str, seconds: float) -> None:
    node = tainted({"key": "cloud.google.com/impending-node-termination"}, {"key": KARPENTER})
    node["metadata"]["labels"] = {LABEL_SHUTDOWN_GRACE: stated}
    notices = node_notices("n4", {"n4": node}, NOW)
    assert [(notice.deadline - NOW).total_seconds() for notice in notices] == [seconds, 120]
    view = node_view(node)
    generation = training_job().node(4, taints=view.taints[::-1], labels=view.labels).plan().status.generation
    assert generation is not None
    assert generation.deadline == notices[0].deadline, "the operator takes the earlier one, too"


@pytest.mark.parametrize(
    ("hours", "announced"), [(0.1, False), (23.6, False), (23.7, True), (24.0, True), (24.1, False)], ids=str
)
def test_the_end_of_a_preemptible_nodes_day_is_a_hint(hours: float, announced: bool) -> None:
    """Compute Engine stops preemptible VMs after a day. Spot VMs have no such limit."""
    born = NOW - timedelta(hours=hours)
    for label in (GKE_PREEMPTIBLE, GKE_SPOT):
        node = {"metadata": {"name": "n4", "labels": {label: "true"}, "creationTimestamp": born.isoformat()}}
        notices = node_notices("n4", {"n4": node}, NOW)
        hint = [(NoticeKind.REBALANCE, born + timedelta(days=1))] if announced and label == GKE_PREEMPTIBLE else []
        assert [(each.kind, each.deadline) for each in notices] == hint


KARPENTER = "karpenter.sh/disrupted"


def test_a_node_that_a_finalizer_holds_is_drained_and_one_that_is_gone_has_no_time_left() -> None:
    """Karpenter holds each of its nodes so: its deletion of one begins the drain."""
    held = tainted({"key": KARPENTER, "effect": "NoSchedule"})
    held["metadata"] |= {"deletionTimestamp": NOW.isoformat(), "finalizers": ["karpenter.sh/termination"]}
    notices = node_notices("n4", {"n4": held}, NOW)
    assert [(notice.source, notice.deadline - NOW) for notice in notices] == [
        ("node-deleted", timedelta(seconds=120)),
        (f"taint:{KARPENTER}", timedelta(seconds=120)),
    ]
    generation = training_job().node(4, deleting=True).plan().status.generation
    assert generation is not None
    assert (generation.reason, generation.deadline) == ("Preempted", NOW + timedelta(seconds=120))
    [gone] = node_notices("n4", {}, NOW)
    assert (gone.id, gone.deadline) == (notices[0].id, NOW)


def tainted(*taints: Any) -> dict[str, Any]:
    return {"metadata": {"name": "n4", "resourceVersion": "1"}, "spec": {"taints": list(taints)}}


@pytest.mark.parametrize(
    "value", ["x" * 10_000, "\x00\x1b[31m\nnode n9 goes", "DROP TABLE nodes", "", None, 7, ["a"]], ids=repr
)
def test_the_value_of_a_taint_changes_nothing(value: Any) -> None:
    plain = tainted({"key": KARPENTER, "effect": "NoSchedule"})
    hostile = tainted({"key": KARPENTER, "effect": "NoSchedule", "value": value})
    assert node_notices("n4", {"n4": hostile}, NOW) == node_notices("n4", {"n4": plain}, NOW)
    assert node_view(hostile) == node_view(plain)


@pytest.mark.parametrize("effect", ["PreferNoSchedule", "NoSchedule", "NoExecute"])
def test_termination_handlers_choose_the_effect(effect: str) -> None:
    assert len(node_notices("n4", {"n4": tainted({"key": KARPENTER, "effect": effect})}, NOW)) == 1


@pytest.mark.parametrize(
    "entry",
    [
        {"key": KARPENTER, "effect": "NoMercy"},
        {"key": KARPENTER, "effect": ["NoSchedule"]},
        {"key": KARPENTER, "effect": None},
        {"key": [KARPENTER], "effect": "NoSchedule"},
        {"effect": "NoSchedule"},
        {},
        None,
        KARPENTER,
    ],
    ids=repr,
)
def test_what_is_no_taint_is_left_out(entry: Any) -> None:
    node = tainted(entry)
    assert node_notices("n4", {"n4": node}, NOW) == []
    assert node_view(node).taints == ()


def test_an_unknown_taint_with_an_endless_key_says_nothing() -> None:
    node = tainted({"key": "x" * 10_000, "effect": "NoSchedule"})
    assert node_notices("n4", {"n4": node}, NOW) == []
    generation = training_job().node(4, taints=node_view(node).taints).plan().status.generation
    assert generation is not None
    assert generation.reason is None


@pytest.mark.parametrize(
    "time",
    [
        *("soon", "2026-01-01T00:00:00", "", 7, "9999-99-99T00:00:00Z"),
        *("9999-12-31T23:59:59Z", "9999-12-31T23:59:59-12:00", "0001-01-01T00:00:00+14:00"),
    ],
    ids=repr,
)
def test_a_time_that_is_none_counts_as_now(time: Any) -> None:
    node = tainted({"key": KARPENTER, "effect": "NoSchedule", "timeAdded": time})
    [notice] = node_notices("n4", {"n4": node}, NOW)
    assert notice.deadline == NOW + timedelta(seconds=120)


@pytest.mark.parametrize(
    ("labels", "written"), [(None, "105"), ({"a": "b"}, "105"), ({LABEL_SHUTDOWN_GRACE: "20"}, None)], ids=str
)
def test_the_watcher_labels_a_node_with_its_grace_unless_it_has_the_label(
    labels: dict[str, str] | None, written: str | None
) -> None:
    node = tainted()
    node["metadata"] |= {"labels": labels}
    patch = desired_change(node, None, "mark", 105) or {}
    assert patch["metadata"].get("labels", {}).get(LABEL_SHUTDOWN_GRACE) == written


def test_the_nodes_mark_keeps_taints_that_it_does_not_understand() -> None:
    odd = {"effect": "NoSchedule", "value": "x" * 10_000}
    [notice] = node_notices("n4", {"n4": tainted({"key": KARPENTER, "effect": "NoSchedule"})}, NOW)
    patch = desired_change(tainted(odd), notice, "mark")
    assert patch is not None
    assert patch["spec"]["taints"][0] == odd


REASONS = (
    "PreemptionByScheduler",
    "DeletionByTaintManager",
    "EvictionByEvictionAPI",
    "DeletionByPodGC",
    "TerminationByKubelet",
)


def disrupted(reason: str) -> dict[str, Any]:
    """The fourth pod, as the API server has it."""
    since = {"lastTransitionTime": NOW.isoformat()}
    labels = {"spottrain.dev/sequence": "4", "spottrain.dev/capacity-type": "spot"}
    return {
        "metadata": {"name": "job-4", "uid": "u4", "labels": labels, "creationTimestamp": NOW.isoformat()},
        "spec": {"nodeName": "n4", "terminationGracePeriodSeconds": 40},
        "status": {"conditions": [{"type": "DisruptionTarget", "status": "True", "reason": reason} | since]},
    }


@pytest.mark.parametrize("grace", [2**63 - 1, 10**12, -(2**63)], ids=repr)
@pytest.mark.parametrize("deleted", [{}, {"deletionTimestamp": "9999-12-31T23:59:59-12:00"}], ids=["", "deleted"])
def test_the_grace_of_a_pod_may_be_any_number(grace: int, deleted: dict[str, str]) -> None:
    pod = disrupted("EvictionByEvictionAPI")
    pod["spec"]["terminationGracePeriodSeconds"] = grace
    pod["metadata"] |= deleted
    [notice] = pod_notices("n4", {}, {"job-4": pod}, NOW)
    assert notice.deadline == NOW + timedelta(seconds=86_400 if grace > 0 else 0)


@pytest.mark.parametrize(("text", "number"), [("4", 4), ("9" * 63, 0), ("-1", 0), ("four", 0), ("", 0)])
def test_the_number_of_a_pod_is_one_that_a_status_can_hold(text: str, number: int) -> None:
    pod = disrupted("EvictionByEvictionAPI")
    pod["metadata"]["labels"]["spottrain.dev/sequence"] = text
    assert pod_view(pod).sequence == number


@pytest.mark.parametrize("reason", [*REASONS, "SomethingNewer", "", "\x1b]0;\n" + "x" * 10_000], ids=lambda r: r[:30])
def test_every_reason_of_a_disruption_is_heard_by_watcher_and_operator(reason: str) -> None:
    pod = disrupted(reason)
    [notice] = pod_notices("n4", {}, {"job-4": pod}, NOW)
    assert (notice.id, notice.kind, notice.deadline) == ("pod/u4", NoticeKind.EVICT, NOW + timedelta(seconds=40))
    view = pod_view(pod)
    disruption = {"disruption": view.disruption, "disrupted_at": view.disrupted_at}
    scene = training_job().pod(4, grace_seconds=view.grace_seconds, **disruption)
    generation = scene.plan().status.generation
    assert generation is not None
    assert (generation.reason, generation.deadline) == ("Preempted", notice.deadline)
    [event] = [each for each in scene.plan().events if each.reason == "Preempted"]
    for text in (notice.source, event.message):
        assert text.isprintable()
        assert len(text) < 400
        assert reason not in REASONS or reason in text
