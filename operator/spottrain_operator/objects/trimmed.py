"""What the caches keep of each object.

They keep the fields that the operator reads, as `observe.py` parses them. A real node names fifty images and renews
its heartbeat; a real pod repeats its template. Without these, ten thousand objects take a few megabytes, and a
heartbeat changes nothing.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from spottrain_api.contract.names import (
    ANNOTATION_CONTROL_CA,
    ANNOTATION_CONTROL_URL,
    ANNOTATION_NOTICE,
    ANNOTATION_POOL,
    ANNOTATION_POOL_HASH,
    ANNOTATION_WATCHER,
    LABEL_CAPACITY_TYPE,
    LABEL_JOB,
    LABEL_JOB_UID,
    LABEL_NAMESPACE,
    LABEL_SEQUENCE,
    LABEL_TEMPLATE_HASH,
)
from spottrain_api.contract.nodes import accepted_taints
from spottrain_operator.core.model import PROTECTION
from spottrain_operator.kube.resources import Manifest

_APPLIED = "kubectl.kubernetes.io/last-applied-configuration"
_POD_ANNOTATIONS = frozenset(
    {ANNOTATION_POOL, ANNOTATION_POOL_HASH, ANNOTATION_CONTROL_URL, ANNOTATION_CONTROL_CA, *PROTECTION}
)
_POD_METADATA = (
    "namespace",
    "name",
    "uid",
    "resourceVersion",
    "creationTimestamp",
    "deletionTimestamp",
)
_POD_LABELS = (LABEL_JOB, LABEL_JOB_UID, LABEL_SEQUENCE, LABEL_CAPACITY_TYPE, LABEL_TEMPLATE_HASH)
_OWNER = ("kind", "name", "uid", "controller")
_POD_SPEC = ("nodeName", "schedulingGroup", "terminationGracePeriodSeconds")
_POD_STATUS = ("phase", "reason", "message", "podIP")
_POD_CONDITIONS = ("PodScheduled", "ContainersReady", "Ready", "DisruptionTarget")
_CONDITION = ("type", "status", "reason", "message", "lastTransitionTime")
_CONTAINER_STATUS = ("name", "ready", "restartCount", "state", "lastState")
_NODE_ANNOTATIONS = (ANNOTATION_NOTICE, ANNOTATION_WATCHER)
_NODE_METADATA = ("name", "uid", "resourceVersion", "labels", "deletionTimestamp")


def trimmed_job(job: Manifest) -> Manifest:
    """Return the job without the records of kubectl and of field managers.

    A write of the status leaves these records alone.
    """
    meta = {key: value for key, value in job["metadata"].items() if key != "managedFields"}
    if _APPLIED in meta.get("annotations", {}):
        meta["annotations"] = {key: value for key, value in meta["annotations"].items() if key != _APPLIED}
    return job | {"metadata": meta}


def trimmed_pod(pod: Manifest) -> Manifest:
    meta, status = pod["metadata"], pod.get("status", {})
    annotations = _only(meta.get("annotations") or {}, _POD_ANNOTATIONS)
    owners = [_only(each, _OWNER) for each in meta.get("ownerReferences") or ()]
    kept = _only(status, _POD_STATUS)
    kept["conditions"] = [
        _only(each, _CONDITION) for each in status.get("conditions") or () if each["type"] in _POD_CONDITIONS
    ]
    for kind in ("containerStatuses", "initContainerStatuses"):
        if status.get(kind):
            kept[kind] = [_only(each, _CONTAINER_STATUS) for each in status[kind]]
    return {
        "metadata": _only(meta, _POD_METADATA)
        | {"labels": _only(meta.get("labels") or {}, _POD_LABELS), "ownerReferences": owners}
        | ({"annotations": annotations} if annotations else {}),
        "spec": _only(pod["spec"], _POD_SPEC),
        "status": kept,
    }


def trimmed_node(node: Manifest) -> Manifest:
    meta = node["metadata"]
    annotations = _only(meta.get("annotations") or {}, _NODE_ANNOTATIONS)
    ready = [
        _only(each, ("type", "status", "lastTransitionTime"))
        for each in node.get("status", {}).get("conditions") or ()
        if each["type"] == "Ready"
    ]
    return {
        "metadata": _only(meta, _NODE_METADATA) | ({"annotations": annotations} if annotations else {}),
        "spec": {"taints": [_only(taint, ("key", "effect")) for taint in accepted_taints(node)]},
        "status": {"conditions": ready},
    }


def job_indices(item: Manifest) -> Iterable[tuple[str, ...]]:
    """An object is found by its job's namespace and name."""
    labels = item["metadata"].get("labels", {})
    if LABEL_JOB in labels:
        yield (LABEL_JOB, item["metadata"].get("namespace") or labels.get(LABEL_NAMESPACE, ""), labels[LABEL_JOB])


def pod_indices(pod: Manifest) -> Iterable[tuple[str, ...]]:
    """A pod is found by its job's name and uid, and by its node."""
    meta = pod["metadata"]
    for label in (LABEL_JOB, LABEL_JOB_UID):
        if label in meta.get("labels", {}):
            yield (label, meta["namespace"], meta["labels"][label])
    if "nodeName" in pod["spec"]:
        yield ("node", pod["spec"]["nodeName"])


def _only(found: Mapping[str, Any], keys: Iterable[str]) -> Manifest:
    return {key: found[key] for key in keys if key in found}
