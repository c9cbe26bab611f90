"""Which jobs a change wakes, and what can't wait.

Losses and notices can't wait. Everything else can.
"""

from __future__ import annotations

from typing import Any

import pytest

from spottrain_api.contract.names import ANNOTATION_NOTICE, ANNOTATION_WATCHER, LABEL_JOB, TAINT_PREEMPTION
from spottrain_api.contract.nodes import NOTICE_LABELS
from spottrain_operator.controller import Priority
from spottrain_operator.kube.cache import Change
from spottrain_operator.kube.identities import JobKey
from spottrain_operator.kube.resources import JOBS, NODES, PODS, Manifest, Resource
from spottrain_operator.objects.trimmed import trimmed_node, trimmed_pod
from spottrain_operator.wakes import first_wakes, wakes

A, B = (JobKey(namespace="team", name=name) for name in "ab")
URGENT, NORMAL, LAST = Priority.URGENT, Priority.NORMAL, Priority.LAST


def pod(*, phase: str = "Running", ready: bool = True, disrupted: bool = False, **metadata: Any) -> Manifest:
    conditions = [
        {"type": "Ready", "status": "True" if ready else "False"},
        {"type": "DisruptionTarget", "status": "True" if disrupted else "False"},
    ]
    meta = {"namespace": "team", "name": "a-1", "uid": "u", "labels": {LABEL_JOB: "a"}} | metadata
    return trimmed_pod({"metadata": meta, "spec": {}, "status": {"phase": phase, "conditions": conditions}})


def node(*, ready: bool = True, taints: tuple[str, ...] = (), notice: str = "", **metadata: Any) -> Manifest:
    meta = {"name": "node-1", "uid": "u", "labels": {}} | metadata
    if notice:
        meta["annotations"] = {ANNOTATION_NOTICE: notice, "other": "x"}
    return trimmed_node(
        {
            "metadata": meta,
            "spec": {"taints": [{"key": key, "effect": "NoSchedule"} for key in taints]},
            "status": {"conditions": [{"type": "Ready", "status": "True" if ready else "False"}]},
        }
    )


def woken(resource: Resource, before: Manifest | None, after: Manifest | None) -> set[tuple[JobKey, Priority]]:
    found = wakes(resource, Change(before=before, after=after), lambda name: {A, B} if name == "node-1" else set())
    return set(found)


POD_CHANGES = {
    "new": (None, pod(), NORMAL),
    "gone": (pod(), None, URGENT),
    "asked to go": (pod(), pod(deletionTimestamp="2026-01-01T00:00:00Z"), URGENT),
    "evicted": (pod(), pod(disrupted=True), URGENT),
    "failed": (pod(), pod(phase="Failed"), URGENT),
    "unready": (pod(), pod(ready=False), URGENT),
    "ready": (pod(ready=False), pod(), NORMAL),
    "annotated": (pod(), pod(ownerReferences=[{"uid": "x"}]), NORMAL),
    "still going": (pod(deletionTimestamp="2026-01-01T00:00:00Z"), pod(deletionTimestamp="2026-01-01"), NORMAL),
}


@pytest.mark.parametrize(("before", "after", "priority"), POD_CHANGES.values(), ids=POD_CHANGES)
def test_a_pod_wakes_its_job(before: Manifest | None, after: Manifest | None, priority: Priority) -> None:
    assert woken(PODS, before, after) == {(A, priority)}


NODE_CHANGES = {
    "gone": (node(), None, URGENT),
    "not ready": (node(), node(ready=False), URGENT),
    "ready again": (node(ready=False), node(), NORMAL),
    "announced": (node(), node(notice="{}"), URGENT),
    "announced anew": (node(notice="{}"), node(notice='{"cancelled": true}'), URGENT),
    "tainted": (node(), node(taints=(TAINT_PREEMPTION,)), URGENT),
    "tainted for something else": (node(), node(taints=("nvidia.com/gpu",)), NORMAL),
    "labelled for a loss": (node(), node(labels=dict.fromkeys(NOTICE_LABELS, "true")), URGENT),
    "being deleted": (node(), node(deletionTimestamp="2026-01-01T00:00:00Z"), URGENT),
    "relabelled": (node(), node(labels={"a": "1"}), NORMAL),
    "watched": (node(), node(annotations={ANNOTATION_WATCHER: "mark"}), NORMAL),
    "watched by another": (
        node(annotations={ANNOTATION_WATCHER: "mark"}),
        node(annotations={ANNOTATION_WATCHER: "another"}),
        NORMAL,
    ),
}


@pytest.mark.parametrize(("before", "after", "priority"), NODE_CHANGES.values(), ids=NODE_CHANGES)
def test_a_node_wakes_the_jobs_on_it(before: Manifest | None, after: Manifest | None, priority: Priority) -> None:
    assert woken(NODES, before, after) == {(A, priority), (B, priority)}


@pytest.mark.parametrize(("phase", "priority"), [("Running", NORMAL), ("Failed", LAST), (None, NORMAL)], ids=str)
def test_a_job_that_is_over_goes_last(phase: str | None, priority: Priority) -> None:
    job: Manifest = {"metadata": {"namespace": "team", "name": "a"}, "status": {"phase": phase} if phase else {}}
    assert woken(JOBS, None, job) == {(A, priority)}


TROUBLES = {
    "none": (node(), NORMAL),
    "announced": (node(notice="{}"), URGENT),
    "tainted": (node(taints=(TAINT_PREEMPTION,)), URGENT),
    "tainted for something else": (node(taints=("nvidia.com/gpu",)), NORMAL),
    "not ready": (node(ready=False), URGENT),
    "being deleted": (node(deletionTimestamp="2026-01-01T00:00:00Z"), URGENT),
}


@pytest.mark.parametrize(("found", "priority"), TROUBLES.values(), ids=TROUBLES)
def test_at_a_start_jobs_on_a_node_in_trouble_go_first(found: Manifest, priority: Priority) -> None:
    phases = {"a": "Running", "b": "Running", "over": "Succeeded"}
    jobs = [{"metadata": {"namespace": "team", "name": name}, "status": {"phase": p}} for name, p in phases.items()]
    over, gone = (JobKey(namespace="team", name=name) for name in ("over", "gone"))
    assert first_wakes(jobs, [found], lambda _: {A, over, gone}) == {A: priority, B: NORMAL, over: LAST}
