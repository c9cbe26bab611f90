"""Parsing what the API server says.

The states are all those in which a pod, a node or a status can be.
"""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Any

import pytest

from spottrain_api.contract.assignments import CapacityType
from spottrain_api.contract.names import ANNOTATION_NOTICE, ANNOTATION_WATCHER
from spottrain_api.contract.notices import Notice
from spottrain_api.v1alpha1.status import TrainingJobStatus
from spottrain_operator.objects.observe import (
    NotUnderstoodError,
    job_view,
    node_view,
    pod_view,
)
from spottrain_operator.objects.trimmed import trimmed_node
from spottrain_operator.objects.write_back import as_written

AT = "2026-01-01T00:00:05Z"
NOW = datetime(2026, 1, 1, 0, 0, 5, tzinfo=UTC)
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


# A termination message that is the end of the container's log, and one that only wants to do harm.
LOG = "loading\npython: No module named spottrain_agent\n\n"
HOSTILE = "\x1b[2J" + "x" * 10_000


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
        (
            {"conditions": [condition("PodScheduled", "False", "SchedulingGated")]},
            {"waiting_reason": "SchedulingGated", "unschedulable_since": MOMENT},
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
            {"phase": "Failed", "containerStatuses": container(terminated={"exitCode": 1, "message": LOG})},
            {"exit_message": "python: No module named spottrain_agent", "waiting_message": None},
        ),
        (
            {"phase": "Failed", "containerStatuses": container(terminated={"exitCode": 1, "message": HOSTILE})},
            {"exit_message": f"[2J{'x' * 296}…"},
        ),
        (
            {"phase": "Failed", "containerStatuses": container(terminated={"exitCode": 1, "message": " \n"})},
            {"exit_message": None},
        ),
        (
            {"conditions": [condition("DisruptionTarget", "True", "EvictionByEvictionAPI")]},
            {"disruption": "EvictionByEvictionAPI"},
        ),
        ({"conditions": [condition("DisruptionTarget", "False", "Whatever")]}, {"disruption": None}),
        (
            {"phase": "Failed", "reason": "Evicted", "message": "The node had condition: [DiskPressure]. "},
            {
                "disruption": None,
                "exit_code": None,
                "kubelet_reason": "Evicted",
                "kubelet_message": "The node had condition: [DiskPressure].",
            },
        ),
    ],
    ids=[
        "new",
        "unschedulable",
        "gated",
        "scheduled",
        "running",
        "no image",
        "cannot start",
        "out of memory",
        "last words",
        "hostile words",
        "no words",
        "disrupted",
        "not disrupted",
        "rejected",
    ],
)
def test_pods(status: dict[str, Any], expected: dict[str, Any]) -> None:
    view = pod_view(pod(status))
    assert {name: getattr(view, name) for name in expected} == expected
    assert (view.sequence, view.capacity_type, view.template_hash) == (7, CapacityType.SPOT, "abc")


@pytest.mark.parametrize(
    ("labels", "expected"),
    [
        ({"spottrain.dev/capacity-type": "on-demand"}, CapacityType.ON_DEMAND),
        ({"spottrain.dev/capacity-type": "Spot"}, CapacityType.SPOT),
        ({}, CapacityType.SPOT),
    ],
    ids=["as it was", "changed", "removed"],
)
def test_a_pod_whose_label_was_changed_counts_as_spot(labels: dict[str, str], expected: CapacityType) -> None:
    assert pod_view(pod({}, labels=labels)).capacity_type is expected


BROKEN_SIDECAR = {"name": "logs", "state": {"waiting": {"reason": "CrashLoopBackOff", "message": "back-off"}}}
UP = {"name": "trainer", "ready": True, "state": {"running": {"startedAt": AT}}}
MESH = {"name": "istio-proxy", "ready": True, "state": {"running": {"startedAt": "2026-01-01T00:00:01Z"}}}


def test_a_sidecar_that_ends_leaves_the_trainer_ready() -> None:
    unready = [condition("Ready", "False", "ContainersNotReady"), condition("ContainersReady", "False")]
    status = {"phase": "Running", "containerStatuses": [UP], "initContainerStatuses": [BROKEN_SIDECAR]}
    view = pod_view(pod(status | {"conditions": unready}))
    assert (view.ready, view.ready_since, view.waiting_reason, view.exit_code) == (True, MOMENT, None, None)
    starting = pod_view(pod(status | {"conditions": unready, "containerStatuses": [UP | {"ready": False}]}))
    assert not starting.ready
    silent_node = [condition("Ready", "False", "NodeNotReady"), condition("ContainersReady", "True")]
    assert not pod_view(pod(status | {"conditions": silent_node})).ready


def test_the_trainers_state_counts_beside_a_container_that_a_webhook_added() -> None:
    ended = {"name": "trainer", "state": {"terminated": {"exitCode": 1, "reason": "Error"}}}
    view = pod_view(pod({"phase": "Running", "containerStatuses": [MESH, ended]}))
    assert (view.exit_code, view.phase, view.lingers) == (1, "Failed", True)
    done = {"name": "trainer", "state": {"terminated": {"exitCode": 0, "reason": "Completed"}}}
    assert pod_view(pod({"phase": "Running", "containerStatuses": [MESH, done]})).phase == "Succeeded"
    assert not pod_view(pod({"phase": "Failed", "containerStatuses": [MESH, ended]})).lingers
    waits = {"name": "trainer", "state": {"waiting": {"reason": "ErrImagePull", "message": "none"}}}
    view = pod_view(pod({"containerStatuses": [MESH, waits]}))
    assert (view.waiting_reason, view.container_started) == ("ErrImagePull", False)


NO_COMMAND = 'exec: "/no/such": stat /no/such: no such file or directory'
IN_TURN = {"name": "trainer", "state": {"waiting": {"reason": "PodInitializing"}}}


@pytest.mark.parametrize(
    ("phase", "state", "expected"),
    [
        (
            "Pending",
            {"waiting": {"reason": "ImagePullBackOff", "message": "no such image"}},
            {
                "waiting_reason": "ImagePullBackOff",
                "waiting_message": "container fetch: no such image",
                "container": "fetch",
            },
        ),
        ("Pending", {"waiting": {"reason": "PodInitializing"}}, {"waiting_reason": "PodInitializing"}),
        (
            "Pending",
            {"running": {"startedAt": AT}},
            {
                "waiting_reason": "PodInitializing",
                "exit_code": None,
                "container": "fetch",
                "initializing_since": MOMENT,
            },
        ),
        ("Pending", {"terminated": {"exitCode": 1, "reason": "Error"}}, {"exit_code": None}),
        ("Pending", {"terminated": {"exitCode": 0, "reason": "Completed"}}, {"exit_code": None}),
        (
            "Failed",
            {"terminated": {"exitCode": 3, "reason": "Error"}},
            {
                "exit_code": 3,
                "exit_reason": "Error",
                "container": "fetch",
                "waiting_reason": None,
                "container_started": False,
            },
        ),
        (
            "Failed",
            {"terminated": {"exitCode": 128, "reason": "StartError", "message": NO_COMMAND}},
            {
                "exit_code": 128,
                "container": "fetch",
                "waiting_reason": "StartError",
                "waiting_message": f"container fetch: {NO_COMMAND}",
                "container_started": False,
            },
        ),
    ],
    ids=["no image", "in turn", "runs", "a sidecar between two runs", "done", "failed", "no command"],
)
def test_an_init_container_that_keeps_the_trainer_from_starting_is_named(
    phase: str, state: dict[str, Any], expected: dict[str, Any]
) -> None:
    entry = {"name": "fetch", "ready": False, "state": state}
    entries = {"containerStatuses": [IN_TURN], "initContainerStatuses": [MESH, entry]}
    view = pod_view(pod({"phase": phase, **entries}))
    assert {name: getattr(view, name) for name in expected} == expected


@pytest.mark.parametrize(
    ("last", "said"),
    [
        ({"exitCode": 128, "reason": "StartError", "message": NO_COMMAND}, f"container logs: {NO_COMMAND}"),
        ({"exitCode": 3, "reason": "Error"}, "container logs has ended 3 times, last with exit code 3 (Error)"),
        (None, "container logs: back-off"),
    ],
    ids=["no command", "failed", "not known"],
)
def test_a_container_that_is_restarted_says_how_its_last_run_ended(last: dict[str, Any] | None, said: str) -> None:
    """The kubelet's message has only the pause."""
    entry = BROKEN_SIDECAR | {"restartCount": 2, "lastState": {"terminated": last} if last else {}}
    view = pod_view(pod({"phase": "Pending", "containerStatuses": [IN_TURN], "initContainerStatuses": [entry]}))
    assert (view.waiting_reason, view.waiting_message, view.container) == ("CrashLoopBackOff", said, "logs")
    assert view.exit_reason == (last or {}).get("reason")


def test_no_init_container_runs_once_all_sidecars_are_up_or_the_trainer_is() -> None:
    waits = pod_view(pod({"phase": "Pending", "containerStatuses": [IN_TURN], "initContainerStatuses": [MESH]}))
    assert (waits.container, waits.initializing_since) == ("trainer", None)
    unready = {"containerStatuses": [UP], "initContainerStatuses": [MESH | {"ready": False}]}
    trains = pod_view(pod({"phase": "Running", **unready}))
    assert (trains.container, trains.initializing_since) == ("trainer", None)


def test_a_terminating_pod() -> None:
    view = pod_view(pod({}, deletionTimestamp=AT))
    assert (view.deleting, view.deletion_deadline) == (True, MOMENT)


NOTICE = Notice(id="i", node="n", source="ec2", deadline=MOMENT, observed_at=MOMENT)


@pytest.mark.parametrize(
    ("annotation", "notice"),
    [
        *((None, None), ("", None), ("{half", None), ('{"id": 1}', None)),
        (NOTICE.to_json().replace("Z", ""), None),
        (NOTICE.to_json(), NOTICE),
    ],
    ids=["none", "empty", "torn", "wrong", "times without a zone", "good"],
)
def test_notices_of_nodes(annotation: str | None, notice: Notice | None) -> None:
    annotations = {} if annotation is None else {ANNOTATION_NOTICE: annotation}
    node = {"metadata": {"name": "n", "annotations": annotations}, "spec": {"taints": [{"key": "a"}]}, "status": {}}
    view = node_view(node)
    assert view.notice == notice
    assert view.taints == ("a",)
    assert view.ready is False


def test_the_caches_keep_what_is_read_of_a_node() -> None:
    annotations = {ANNOTATION_NOTICE: NOTICE.to_json(), ANNOTATION_WATCHER: "mark", "other": "x"}
    node = {
        "metadata": {
            "name": "n",
            "uid": "u",
            "labels": {"a": "b"},
            "annotations": annotations,
            "deletionTimestamp": AT,
        },
        "spec": {"taints": [{"key": "a", "effect": "NoSchedule"}]},
        "status": {"conditions": [{"type": "Ready", "status": "True"}], "images": []},
    }
    view = node_view(node)
    assert view.watcher == "mark"
    assert node_view(trimmed_node(node)) == view


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
    ("changes", "unknown"),
    [
        ({"nodes": {"max": 2, "least": 1}, "colour": "red"}, ("spec.colour", "spec.nodes.least")),
        ({"strategy": "wishful"}, ("spec.strategy",)),
        ({"runPolicy": {"failureBudget": -1, "suspend": True}}, ("spec.runPolicy.failureBudget",)),
        ({"stability": {"lossSpike": {"factor": 0.5}}}, ("spec.stability.lossSpike.factor",)),
        (
            {"podTemplate": {"volumes": [{"name": "a", "nfs": {}}, {"name": 1}, {"name": "c"}]}},
            ("spec.podTemplate.volumes[0].nfs", "spec.podTemplate.volumes[1].name"),
        ),
    ],
    ids=["field", "value", "number", "required inside", "in a list"],
)
def test_what_a_newer_version_added_is_named_and_left_out(changes: dict[str, Any], unknown: tuple[str, ...]) -> None:
    view = job_view(job(SPEC | changes))
    assert view.not_understood == unknown
    assert (view.spec.strategy, view.spec.run_policy.failure_budget, view.spec.nodes.max) == ("auto", 3, 2)
    assert view.spec.run_policy.suspend == ("runPolicy" in changes), "what is understood holds"
    assert view.spec.stability is None or view.spec.stability.loss_spike is None
    assert [volume.name for volume in view.spec.pod_template.volumes] == ["a", "c"] * ("podTemplate" in changes)


GENERATION = {
    "number": 7,
    "state": "Active",
    "rendezvousID": "r",
    "rendezvousEndpoint": "10.0.0.1:1",
    "worldSize": 1,
    "members": [{"pod": "gpt-1", "podUid": "u1", "address": "a", "node": "n", "nodeRank": 0, "capacityType": "spot"}],
    "startedAt": AT,
}


@pytest.mark.parametrize(
    ("spec", "status", "field"),
    [
        ({}, {}, "spec.entrypoint"),
        (SPEC | {"nodes": {"max": "many"}}, {}, "spec.nodes"),
        (SPEC, "Running", "status"),
        (SPEC, {"phase": "Paused"}, "status.phase"),
        (SPEC, {"generation": GENERATION | {"state": "Paused"}}, "status.generation.state"),
        (SPEC, {"generation": GENERATION | {"state": "Draining", "reason": "CostLimit"}}, "status.generation.reason"),
        (SPEC, {"lastSequence": "x"}, "status.lastSequence"),
        (SPEC, {"commit": {"generation": 7}}, "status.commit"),
    ],
)
def test_a_job_is_left_alone_if_what_decisions_hang_on_cannot_be_read(
    spec: dict[str, Any], status: Any, field: str
) -> None:
    with pytest.raises(NotUnderstoodError, match=field):
        job_view(job(spec, status))


def test_any_reason_is_understood_of_a_generation_that_has_ended() -> None:
    status = job_view(job(SPEC, {"generation": GENERATION | {"state": "Ended", "reason": "CostLimit"}})).status
    assert status.generation is not None
    assert status.generation.reason == "CostLimit"


def test_a_status_is_read_without_what_a_newer_operator_added_and_without_what_is_only_for_people() -> None:
    found = {
        "phase": "Running",
        "quota": {"used": 3},
        "generation": GENERATION | {"pausedAt": AT},
        "progress": {"step": "many"},
        "transitions": [{"generation": "x", "reason": "Grow", "at": AT}],
    }
    status = job_view(job(SPEC, found)).status
    assert status.generation is not None
    assert (status.generation.number, status.generation.members[0].pod_uid) == (7, "u1")
    assert (status.progress.step, status.transitions) == (0, ())


def test_what_a_newer_operator_added_to_the_status_is_written_back() -> None:
    found: dict[str, Any] = {
        "phase": "Running",
        "quota": {"used": 3},
        "generation": GENERATION | {"pausedAt": AT},
        "cost": {"total": 1.0, "byPool": {"a": 1.0}},
        "commit": {"generation": 7, "step": 5, "manifest": "m", "committedAt": AT, "digest": "d"},
    }
    before = job_view(job(SPEC, found)).status
    assert before.commit is not None
    assert before.generation is not None
    written = as_written(before, before, found)
    assert found["generation"].items() <= written["generation"].items()
    assert {key: written[key] for key in found} == found | {"generation": written["generation"]}

    changed = before.model_copy(
        update={
            "failures": 1,
            "commit": before.commit.model_copy(update={"step": 9}),
            "generation": before.generation.model_copy(update={"reason": "Hang"}),
        }
    )
    written = as_written(changed, before, found)
    assert (written["quota"], written["cost"]) == (found["quota"], found["cost"])
    assert (written["generation"]["pausedAt"], written["generation"]["reason"]) == (AT, "Hang")
    assert "digest" not in written["commit"], "that was another commit's"
    successor = changed.model_copy(update={"generation": before.generation.model_copy(update={"number": 8})})
    assert "pausedAt" not in as_written(successor, before, found)["generation"]
