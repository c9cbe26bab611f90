"""The Workloads of Kueue by which a job asks for quota: their manifests, what they say, and how they end."""

from __future__ import annotations

import hashlib
import json
from datetime import datetime
from typing import Any

from spottrain_api.contract.assignments import CapacityType
from spottrain_api.contract.names import (
    API_VERSION,
    KIND,
    LABEL_CONTENT,
    LABEL_JOB,
    LABEL_JOB_UID,
    LABEL_MANAGED_BY,
    LABEL_PART,
    MANAGED_BY,
)
from spottrain_operator.core.facts.demand import minimum_nodes
from spottrain_operator.core.model import JobView
from spottrain_operator.core.workloads import CreateWorkload, Part, WorkloadView
from spottrain_operator.kube.cluster import Cluster
from spottrain_operator.kube.errors import NotAllowedError
from spottrain_operator.kube.resources import (
    PRIORITY_CLASSES,
    WORKLOAD_PRIORITY_CLASSES,
    WORKLOADS,
    Manifest,
)
from spottrain_operator.objects.control_address import ControlAddress
from spottrain_operator.objects.placement import DEFAULT_SITE, Site, of_nodes
from spottrain_operator.objects.pods import JobRef, build_pod

# What Kueue counts of a pod, and by what it chooses flavors.
_COUNTED = ("nodeSelector", "tolerations", "priorityClassName", "runtimeClassName", "resourceClaims", "overhead")
_COUNTED_OF_CONTAINER = ("name", "resources", "restartPolicy")
_NOBODY = ControlAddress(url="https://nobody", ca="")
# Kueue takes such a Workload up again by itself. It waits for others to change something.
_REQUEUED = frozenset({"Preempted", "NodeFailures"})
# Kueue's limit of a condition's message.
_MOST_OF_MESSAGE = 1024
_LEAST_PRIORITY = -(2**31)


def content_of(job: JobView, site: Site = DEFAULT_SITE) -> str:
    """Hash of what the job's Workloads ask for. If it changes, new ones are made."""
    templates = {each.value: _template(job, each, site) for each in CapacityType}
    least = {each.value: number for each, number in minimum_nodes(job.spec).items()}
    content = [job.uid, job.queue, job.queue_priority, templates, least]
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()[:8]


def _template(job: JobView, capacity_type: CapacityType, site: Site) -> Manifest | None:
    """What Kueue counts of a pod of the type; None if the job's pools have none."""
    ref = JobRef(namespace=job.namespace, name=job.name, uid=job.uid)
    try:
        pod = build_pod(
            ref,
            job.spec,
            name=job.name,
            sequence=0,
            capacity_type=capacity_type,
            pool=None,
            control=_NOBODY,
            site=site,
        )["spec"]
    except ValueError:
        return None
    containers = {
        kind: [_only(each, _COUNTED_OF_CONTAINER) for each in pod[kind]]
        for kind in ("containers", "initContainers")
        if kind in pod
    }
    return {
        "spec": _only(pod, _COUNTED)
        | containers
        | {"affinity": {"nodeAffinity": of_nodes(pod["affinity"]["nodeAffinity"])}}
    }


def _only(found: Manifest, keys: tuple[str, ...]) -> Manifest:
    return {key: found[key] for key in keys if key in found}


async def create_workload(cluster: Cluster, job: JobView, action: CreateWorkload, site: Site = DEFAULT_SITE) -> None:
    """Make a Workload, which the job owns.

    Raises:
        NotAllowedError: Its priority class doesn't exist.
    """
    await cluster.create(WORKLOADS, _manifest(job, action, await _priority(cluster, job, action.part), site))


def _manifest(job: JobView, action: CreateWorkload, priority: Manifest, site: Site) -> Manifest:
    pod_sets = [
        {"name": each.value, "count": number, "template": _template(job, each, site)}
        for each, number in action.nodes.items()
        if number
    ]
    return {
        "apiVersion": f"{WORKLOADS.group}/{WORKLOADS.version}",
        "kind": "Workload",
        "metadata": {
            "namespace": job.namespace,
            "name": action.name,
            "labels": {
                LABEL_JOB: job.name,
                LABEL_JOB_UID: job.uid,
                LABEL_MANAGED_BY: MANAGED_BY,
                LABEL_PART: action.part.value,
                LABEL_CONTENT: action.content,
            },
            "ownerReferences": [
                {
                    "apiVersion": API_VERSION,
                    "kind": KIND,
                    "name": job.name,
                    "uid": job.uid,
                    "controller": True,
                    "blockOwnerDeletion": True,
                }
            ],
        },
        "spec": {"queueName": job.queue, "podSets": pod_sets} | priority,
    }


async def _priority(cluster: Cluster, job: JobView, part: Part) -> Manifest:
    """The fields for the priority of a Workload.

    A node beyond nodes.min comes after all that others of the same class need to start. It names no class, which
    would set its value.
    """
    found = await _class_of(cluster, job)
    value = found["value"] if found is not None else 0
    if part is Part.MORE:
        return {"priority": max(_LEAST_PRIORITY, value - 1)}
    if found is None:
        return {"priority": value}
    resource = WORKLOAD_PRIORITY_CLASSES if job.queue_priority else PRIORITY_CLASSES
    kind = "WorkloadPriorityClass" if job.queue_priority else "PriorityClass"
    reference = {"group": resource.group, "kind": kind, "name": found["metadata"]["name"]}
    return {"priority": value, "priorityClassRef": reference}


async def _class_of(cluster: Cluster, job: JobView) -> Manifest | None:
    """The priority class of the job: that of its label, that of its pods, the cluster's default, or none."""
    if job.queue_priority:
        return _there(await cluster.get(WORKLOAD_PRIORITY_CLASSES, job.queue_priority), job.queue_priority, "label")
    if name := job.spec.pod_template.priority_class_name:
        return _there(await cluster.get(PRIORITY_CLASSES, name), name, "podTemplate")
    classes = (await cluster.list(PRIORITY_CLASSES)).items
    return max((each for each in classes if each.get("globalDefault")), key=lambda each: -each["value"], default=None)


def _there(found: Manifest | None, name: str, where: str) -> Manifest:
    if found is not None:
        return found
    if where == "label":
        raise NotAllowedError(
            f"its label kueue.x-k8s.io/priority-class names {name}, and there is no such WorkloadPriorityClass: "
            "create it, or remove the label"
        )
    raise NotAllowedError(
        f"podTemplate.priorityClassName names {name}, and there is no such PriorityClass: create it, or remove the "
        "field"
    )


def trimmed_workload(workload: Manifest) -> Manifest:
    """What a cache keeps of it: what `workload_view` reads."""
    meta, spec, status = workload["metadata"], workload.get("spec", {}), workload.get("status") or {}
    pod_sets = [{"name": each["name"], "count": each.get("count", 1)} for each in spec.get("podSets", ())]
    conditions = [_only(each, ("type", "status", "reason", "message")) for each in status.get("conditions") or ()]
    return {
        "metadata": _only(meta, ("namespace", "name", "uid", "resourceVersion", "labels", "deletionTimestamp")),
        "spec": {"active": spec.get("active", True), "podSets": pod_sets},
        "status": {"conditions": conditions},
    }


def workload_view(workload: Manifest) -> WorkloadView:
    """Parse a Workload that the operator has made."""
    meta, spec = workload["metadata"], workload["spec"]
    conditions = {each["type"]: each for each in (workload.get("status") or {}).get("conditions") or ()}
    counts = {each["name"]: int(each.get("count", 1)) for each in spec["podSets"]}
    evicted = _is_true(conditions, "Evicted")
    said = conditions.get("Evicted" if evicted else "QuotaReserved", {})
    if not evicted and _is_true(conditions, "QuotaReserved"):
        said = {} if _is_true(conditions, "Admitted") else conditions.get("Admitted", {})
    return WorkloadView(
        name=meta["name"],
        uid=meta["uid"],
        part=Part(meta["labels"][LABEL_PART]),
        content=meta["labels"][LABEL_CONTENT],
        nodes={each: counts.get(each.value, 0) for each in CapacityType},
        active=spec.get("active", True),
        reserved=_is_true(conditions, "QuotaReserved"),
        admitted=_is_true(conditions, "Admitted"),
        evicted=evicted,
        ready=_is_true(conditions, "PodsReady"),
        finished=_is_true(conditions, "Finished"),
        reason=said.get("reason", ""),
        message=said.get("message", ""),
    )


def _is_true(conditions: dict[str, Any], kind: str) -> bool:
    return bool(conditions.get(kind, {}).get("status") == "True")


async def release_workload(cluster: Cluster, job: JobView, name: str, uid: str, now: datetime) -> None:
    """Give an evicted Workload's quota back, as Kueue's own integrations do once their pods are gone."""
    workload = await cluster.get(WORKLOADS, name, namespace=job.namespace)
    if workload is None or workload["metadata"]["uid"] != uid:
        return
    evicted = next((c for c in _conditions(workload) if c["type"] == "Evicted" and c["status"] == "True"), None)
    if evicted is None:
        return
    reason, message = evicted["reason"], evicted.get("message", "")
    changes = [
        ("QuotaReserved", False, "Pending", message),
        ("Admitted", False, "NoReservation", "The workload has no reservation"),
        ("Requeued", reason in _REQUEUED, reason, message),
        ("PodsReady", False, "WaitForStart", "The job waits for quota"),
    ]
    await _write_conditions(cluster, workload, changes, now, without=("admission",))


async def report_ready(cluster: Cluster, job: JobView, name: str, uid: str, now: datetime) -> None:
    """Say that a Workload's pods are ready."""
    workload = await cluster.get(WORKLOADS, name, namespace=job.namespace)
    if workload is not None and workload["metadata"]["uid"] == uid:
        await _write_conditions(cluster, workload, [("PodsReady", True, "Started", "The job's pods are ready")], now)


async def finish_workload(
    cluster: Cluster, job: JobView, name: str, uid: str, *, succeeded: bool, message: str, now: datetime
) -> None:
    """Say that a Workload needs its quota no more."""
    workload = await cluster.get(WORKLOADS, name, namespace=job.namespace)
    if workload is None or workload["metadata"]["uid"] != uid:
        return
    reason = "Succeeded" if succeeded else "Failed"
    await _write_conditions(cluster, workload, [("Finished", True, reason, message)], now)


def _conditions(workload: Manifest) -> list[Manifest]:
    return list((workload.get("status") or {}).get("conditions") or ())


async def _write_conditions(
    cluster: Cluster,
    workload: Manifest,
    changes: list[tuple[str, bool, str, str]],
    now: datetime,
    *,
    without: tuple[str, ...] = (),
) -> None:
    """Set conditions of a Workload. Everything else of its status stays, but for the fields `without`."""
    known = {each["type"]: each for each in _conditions(workload)}
    for kind, holds, reason, message in changes:
        status = "True" if holds else "False"
        old = known.get(kind, {})
        same = old.get("status") == status
        known[kind] = {
            "type": kind,
            "status": status,
            "reason": reason,
            "message": message[:_MOST_OF_MESSAGE],
            "observedGeneration": workload["metadata"].get("generation", 0),
            "lastTransitionTime": old["lastTransitionTime"] if same else f"{now:%Y-%m-%dT%H:%M:%SZ}",
        }
    kept = {key: each for key, each in (workload.get("status") or {}).items() if key not in without}
    written = workload | {"status": kept | {"conditions": list(known.values())}}
    await cluster.replace(WORKLOADS, written, subresource="status")
