"""What the caches keep of each object.

Nothing that is read is missing. What is large or changes all the time is gone.
"""

from __future__ import annotations

import json
from typing import Any

import pytest

from spottrain_api.contract.names import (
    ANNOTATION_DO_NOT_DISRUPT,
    ANNOTATION_NOTICE,
    ANNOTATION_POOL,
    ANNOTATION_POOL_HASH,
    ANNOTATION_WATCHER,
    LABEL_CAPACITY_TYPE,
    LABEL_JOB,
    LABEL_JOB_UID,
    LABEL_SEQUENCE,
    LABEL_TEMPLATE_HASH,
    TAINT_PREEMPTION,
)
from spottrain_operator.kube.resources import Manifest
from spottrain_operator.objects.observe import node_view, owned_by, pod_view
from spottrain_operator.objects.trimmed import trimmed_job, trimmed_node, trimmed_pod

AT = "2026-01-01T00:00:00Z"
NOTICE = {"id": "n", "node": "node-1", "source": "ec2", "deadline": AT, "observedAt": AT}


def condition(kind: str, status: str = "True", **more: Any) -> Manifest:
    return {"type": kind, "status": status, "lastTransitionTime": AT, "lastHeartbeatTime": AT} | more


def node() -> Manifest:
    return {
        "metadata": {
            "name": "node-1",
            "uid": "u",
            "resourceVersion": "7",
            "deletionTimestamp": AT,
            "labels": {"cloud.google.com/gke-spot": "true"},
            "annotations": {
                ANNOTATION_NOTICE: json.dumps(NOTICE),
                ANNOTATION_WATCHER: "mark",
                "large": "x" * 5000,
            },
            "managedFields": [{"manager": "kubelet"}],
        },
        "spec": {"taints": [{"key": TAINT_PREEMPTION, "value": "x", "effect": "NoSchedule"}, {"odd": 1}]},
        "status": {
            "conditions": [condition("Ready"), condition("DiskPressure", "False")],
            "images": [{"names": [f"image-{number}"]} for number in range(50)],
        },
    }


def pod(**status: Any) -> Manifest:
    labels = {
        LABEL_JOB: "gpt",
        LABEL_JOB_UID: "j",
        LABEL_SEQUENCE: "3",
        LABEL_CAPACITY_TYPE: "spot",
        LABEL_TEMPLATE_HASH: "t",
    }
    return {
        "metadata": {
            "namespace": "team",
            "name": "gpt-3",
            "uid": "u",
            "resourceVersion": "7",
            "labels": labels,
            "annotations": {
                ANNOTATION_POOL: "a",
                ANNOTATION_POOL_HASH: "b",
                ANNOTATION_DO_NOT_DISRUPT: "true",
                "other": "x",
            },
            "ownerReferences": [{"uid": "j", "controller": True}],
            "creationTimestamp": AT,
            "deletionTimestamp": AT,
            "managedFields": [{"manager": "spottrain"}],
        },
        "spec": {
            "nodeName": "node-1",
            "terminationGracePeriodSeconds": 40,
            "containers": [{"name": "trainer", "env": [{"name": "A"}] * 100}],
        },
        "status": status,
    }


STATES: dict[str, Manifest] = {
    "new": {},
    "up": {
        "phase": "Running",
        "podIP": "10.0.0.1",
        "conditions": [condition("Ready"), condition("PodScheduled")],
        "containerStatuses": [{"name": "trainer", "ready": True, "state": {"running": {"startedAt": AT}}}],
    },
    "ready beside a sidecar that ended": {
        "phase": "Running",
        "conditions": [condition("Ready", "False"), condition("ContainersReady", "False")],
        "containerStatuses": [
            {"name": "trainer", "ready": True, "state": {"running": {"startedAt": AT}}},
            {"name": "proxy", "ready": False, "state": {"terminated": {"exitCode": 1}}},
        ],
    },
    "no node": {"conditions": [condition("PodScheduled", "False", reason="Unschedulable", message="no room")]},
    "evicted": {"phase": "Failed", "reason": "Evicted", "conditions": [condition("DisruptionTarget", reason="x")]},
    "rejected": {"phase": "Failed", "reason": "UnexpectedAdmissionError", "message": "Allocate failed"},
    "no image": {"containerStatuses": [{"name": "trainer", "state": {"waiting": {"reason": "ErrImagePull"}}}]},
    "killed": {
        "phase": "Failed",
        "containerStatuses": [{"name": "trainer", "state": {"terminated": {"exitCode": 137, "reason": "OOMKilled"}}}],
    },
    "last words": {
        "phase": "Failed",
        "containerStatuses": [{"name": "trainer", "state": {"terminated": {"exitCode": 1, "message": "a\nb\n"}}}],
    },
    "an init container that runs": {
        "phase": "Pending",
        "initContainerStatuses": [{"name": "fetch", "ready": False, "state": {"running": {"startedAt": AT}}}],
    },
    "a sidecar that is restarted": {
        "phase": "Pending",
        "initContainerStatuses": [
            {
                "name": "proxy",
                "restartCount": 4,
                "state": {"waiting": {"reason": "CrashLoopBackOff", "message": "back-off"}},
                "lastState": {"terminated": {"exitCode": 2, "reason": "Error"}},
            }
        ],
    },
    "a failed init container": {
        "phase": "Failed",
        "initContainerStatuses": [{"name": "fetch", "state": {"terminated": {"exitCode": 2, "reason": "Error"}}}],
    },
}


@pytest.mark.parametrize("status", STATES.values(), ids=STATES)
def test_a_trimmed_pod_reads_as_the_whole_one(status: Manifest) -> None:
    whole = pod(**status)
    trimmed = trimmed_pod(whole)
    assert pod_view(trimmed) == pod_view(whole)
    assert owned_by(trimmed, "j")
    assert trimmed_pod(trimmed) == trimmed
    assert len(json.dumps(trimmed)) < 1500


@pytest.mark.parametrize("status", ["True", "Unknown"])
def test_a_trimmed_node_reads_as_the_whole_one(status: str) -> None:
    whole = node()
    whole["status"]["conditions"] = [condition("Ready", status), condition("DiskPressure", "False")]
    trimmed = trimmed_node(whole)
    assert node_view(trimmed) == node_view(whole)
    assert (node_view(trimmed).unready_since is None) == (status == "True")
    assert trimmed_node(trimmed) == trimmed
    assert len(json.dumps(trimmed)) < 800


def test_a_heartbeat_changes_nothing() -> None:
    later = node()
    later["status"]["conditions"] = [condition("Ready", lastHeartbeatTime="2026-01-01T00:05:00Z")]
    assert trimmed_node(later) == trimmed_node(node())


def test_what_nobody_reads_of_a_pod_changes_nothing() -> None:
    before, after = pod(**STATES["up"]), pod(**STATES["up"])
    after["metadata"]["labels"] |= {"topology.kubernetes.io/zone": "us-east-1a"}
    after["metadata"]["ownerReferences"] = [{"uid": "j", "controller": True, "blockOwnerDeletion": True}]
    after["status"] |= {
        "conditions": [condition("Initialized"), condition("Ready", lastProbeTime=AT), condition("PodScheduled")],
        "podIPs": [{"ip": "10.0.0.1"}],
    }
    assert trimmed_pod(after) == trimmed_pod(before)


def test_a_trimmed_job_is_the_whole_one_without_records_of_its_writers() -> None:
    meta = {"name": "gpt", "annotations": {"kubectl.kubernetes.io/last-applied-configuration": "{}", "own": "1"}}
    job = {"metadata": meta | {"managedFields": [{}]}, "spec": {"image": "x"}, "status": {"phase": "Running"}}
    assert trimmed_job(job) == job | {"metadata": {"name": "gpt", "annotations": {"own": "1"}}}
