"""Parsing what the API server says: every state a pod, a node or a status can be met in."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Any

import pytest

from spottrain_api.contract import ANNOTATION_NOTICE, CapacityType, Notice
from spottrain_api.v1alpha1 import TrainingJobStatus
from spottrain_operator.cluster import ForbiddenError
from spottrain_operator.observe import (
    InvalidJobError,
    job_status,
    job_view,
    may_wait_for_volumes,
    node_view,
    pod_view,
    refusal,
    with_newest_event,
)

AT = "2026-01-01T00:00:05Z"
MOMENT = datetime(2026, 1, 1, 0, 0, 5, tzinfo=UTC)


def pod(status: dict[str, Any], **metadata: Any) -> dict[str, Any]:
    labels = {
        "spottrain.dev/sequence": "7",
        "spottrain.dev/capacity-type": "spot",
        "spottrain.dev/template-hash": "abc",
    }
    meta = {"name": "gpt-7", "uid": "u", "labels": labels, "creationTimestamp": AT} | metadata
    return {"metadata": meta, "spec": {}, "status": status}


def condition(kind: str, status: str, reason: str = "") -> dict[str, str]:
    return {"type": kind, "status": status, "reason": reason, "lastTransitionTime": AT}


def container(**state: Any) -> list[dict[str, Any]]:
    return [{"name": "trainer", "state": state}]


@pytest.mark.parametrize(
    ("status", "expected"),
    [
        ({}, {"phase": "Pending", "ready": False, "container_started": False}),
        (
            {"conditions": [condition("PodScheduled", "False", "Unschedulable")]},
            {"unschedulable_since": MOMENT, "scheduled_at": None},
        ),
        ({"conditions": [condition("PodScheduled", "True")]}, {"scheduled_at": MOMENT, "unschedulable_since": None}),
        (
            {
                "phase": "Running",
                "conditions": [condition("Ready", "True")],
                "containerStatuses": container(running={}),
            },
            {"ready": True, "ready_since": MOMENT, "container_started": True},
        ),
        (
            {"containerStatuses": container(waiting={"reason": "ImagePullBackOff", "message": "no such image"})},
            {"waiting_reason": "ImagePullBackOff", "waiting_message": "no such image", "container_started": False},
        ),
        (
            {"phase": "Failed", "containerStatuses": container(terminated={"reason": "StartError", "exitCode": 128})},
            {"waiting_reason": "StartError", "container_started": False, "exit_code": 128},
        ),
        (
            {"phase": "Failed", "containerStatuses": container(terminated={"reason": "OOMKilled", "exitCode": 137})},
            {"exit_reason": "OOMKilled", "container_started": True, "exit_code": 137, "waiting_reason": None},
        ),
        (
            {"conditions": [condition("DisruptionTarget", "True", "EvictionByEvictionAPI")]},
            {"disruption": "EvictionByEvictionAPI"},
        ),
        ({"conditions": [condition("DisruptionTarget", "False", "Whatever")]}, {"disruption": None}),
        ({"phase": "Failed", "reason": "Evicted"}, {"disruption": "Evicted"}),
    ],
    ids=[
        "new",
        "unschedulable",
        "scheduled",
        "running",
        "no image",
        "cannot start",
        "out of memory",
        "disrupted",
        "not disrupted",
        "evicted",
    ],
)
def test_pods(status: dict[str, Any], expected: dict[str, Any]) -> None:
    view = pod_view(pod(status))
    assert {name: getattr(view, name) for name in expected} == expected
    assert (view.sequence, view.capacity_type, view.template_hash) == (7, CapacityType.SPOT, "abc")


def test_a_pod_without_its_volumes_waits_for_what_the_newest_event_says() -> None:
    status = {"phase": "Pending", "containerStatuses": container(waiting={"reason": "ContainerCreating"})}
    made = pod(status)
    made["spec"]["nodeName"] = "n"
    waiting = pod_view(made)
    assert may_wait_for_volumes(waiting)
    assert not may_wait_for_volumes(pod_view(pod(status))), "it has no node yet"
    assert with_newest_event(waiting, {"reason": "Pulling"}) == waiting
    told = with_newest_event(waiting, {"reason": "FailedMount", "message": 'secret "keys" not found'})
    assert (told.waiting_reason, told.waiting_message) == ("FailedMount", 'secret "keys" not found')


@pytest.mark.parametrize(
    ("said", "lasting"),
    [
        ('serviceaccount "trainer" not found', True),
        ("exceeded quota: team, requested: pods=1, used: pods=4, limited: pods=4", False),
        ('User "operator" cannot create resource "pods" in the namespace "team"', False),
    ],
)
def test_refusals_that_pass_and_that_last(said: str, lasting: bool) -> None:
    assert refusal(ForbiddenError(said), MOMENT).lasting == lasting


def test_a_terminating_pod() -> None:
    view = pod_view(pod({}, deletionTimestamp=AT))
    assert (view.deleting, view.deletion_deadline) == (True, MOMENT)


NOTICE = Notice(id="i", node="n", source="ec2", deadline=MOMENT, observed_at=MOMENT)


@pytest.mark.parametrize(
    ("annotation", "notice"),
    [(None, None), ("", None), ("{half", None), ('{"id": 1}', None), (NOTICE.to_json(), NOTICE)],
    ids=["none", "empty", "torn", "wrong", "good"],
)
def test_notices_of_nodes(annotation: str | None, notice: Notice | None) -> None:
    annotations = {} if annotation is None else {ANNOTATION_NOTICE: annotation}
    node = {"metadata": {"name": "n", "annotations": annotations}, "spec": {"taints": [{"key": "a"}]}, "status": {}}
    view = node_view(node)
    assert view.notice == notice
    assert view.taints == ("a",)
    assert view.ready is False


SPEC = {
    "image": "i",
    "entrypoint": {"script": "train.py"},
    "nodes": {"max": 2},
    "batch": {"global": 8},
    "checkpoint": {"uri": "s3://b/p"},
}


def job(spec: dict[str, Any], status: Any = None) -> dict[str, Any]:
    metadata = {"namespace": "team", "name": "gpt", "uid": "u", "generation": 3, "creationTimestamp": AT}
    return {"metadata": metadata, "spec": spec} | ({"status": status} if status is not None else {})


def test_a_good_job() -> None:
    view = job_view(job(SPEC))
    assert (view.metadata_generation, view.created_at, view.status) == (3, MOMENT, TrainingJobStatus())


@pytest.mark.parametrize(
    ("spec", "sentence"),
    [
        ({}, "spec.image"),
        (SPEC | {"strategy": "wishful"}, "spec.strategy"),
        (SPEC | {"nodes": {"max": 2, "least": 1}}, "spec.nodes.least"),
    ],
    ids=["empty", "unknown strategy", "unknown field"],
)
def test_a_spec_that_cannot_be_used_says_which_field(spec: dict[str, Any], sentence: str) -> None:
    with pytest.raises(InvalidJobError, match=sentence):
        job_view(job(spec))


@pytest.mark.parametrize("status", [{"phase": "Wrong"}, {"generation": {"number": "x"}}, {"unknown": 1}])
def test_a_status_that_cannot_be_read_is_an_empty_one(status: dict[str, Any]) -> None:
    assert job_status(job(SPEC, status)) == TrainingJobStatus()
