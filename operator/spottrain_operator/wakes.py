"""Which jobs a change in the cluster concerns, and whether that can wait."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator

from spottrain_api.contract.names import ANNOTATION_NOTICE
from spottrain_api.v1alpha1.status import FINISHED_PHASES
from spottrain_operator.controller import Priority
from spottrain_operator.core.facts.notices import loss_marks
from spottrain_operator.kube.cache import Change
from spottrain_operator.kube.identities import JobKey
from spottrain_operator.kube.resources import JOBS, NODE_POOLS, NODES, PODS, WORKLOADS, Manifest, Resource
from spottrain_operator.objects.watched_cluster import job_of


def wakes(
    resource: Resource, change: Change, jobs_on: Callable[[str], set[JobKey]]
) -> Iterator[tuple[JobKey, Priority]]:
    """The jobs to wake.

    Args:
        resource: Of the object that has changed.
        change: What it was and is.
        jobs_on: The jobs with a pod on a node.
    """
    newest = change.after or change.before
    assert newest is not None
    if resource == JOBS:
        yield JobKey.of(newest), priority_of(newest)
    elif resource == PODS:
        yield job_of(newest), _priority(change, _troubles_of_pod)
    elif resource in (WORKLOADS, NODE_POOLS):
        yield job_of(newest), Priority.NORMAL
    elif resource == NODES:
        priority = _priority(change, _troubles_of_node)
        for key in jobs_on(newest["metadata"]["name"]):
            yield key, priority


def first_wakes(
    jobs: Iterable[Manifest], nodes: Iterable[Manifest], jobs_on: Callable[[str], set[JobKey]]
) -> dict[JobKey, Priority]:
    """All jobs, as an operator wakes them that starts to lead.

    What befell a node while nobody led is news: the agents train on there.

    Args:
        jobs: All jobs.
        nodes: All nodes.
        jobs_on: The jobs with a pod on a node.
    """
    found = {JobKey.of(job): priority_of(job) for job in jobs}
    for node in nodes:
        if _troubles_of_node(node):
            on_it = jobs_on(node["metadata"]["name"])
            found |= {key: Priority.URGENT for key in on_it if found.get(key) is Priority.NORMAL}
    return found


def priority_of(job: Manifest) -> Priority:
    """A job that is over has the time that others leave."""
    return Priority.LAST if (job.get("status") or {}).get("phase") in FINISHED_PHASES else Priority.NORMAL


def _priority(change: Change, troubles: Callable[[Manifest], set[str]]) -> Priority:
    """Urgent if the object is gone, or in a trouble in which it wasn't."""
    if change.before is None:
        return Priority.NORMAL
    worse = change.after is None or troubles(change.after) - troubles(change.before)
    return Priority.URGENT if worse else Priority.NORMAL


def _troubles_of_pod(pod: Manifest) -> set[str]:
    status = pod["status"]
    conditions = {each["type"] for each in status.get("conditions", ()) if each["status"] == "True"}
    found = {
        "deleting": "deletionTimestamp" in pod["metadata"],
        "ended": status.get("phase") in ("Succeeded", "Failed"),
        "disrupted": "DisruptionTarget" in conditions,
        "unready": "Ready" not in conditions,
    }
    return {name for name, holds in found.items() if holds}


def _troubles_of_node(node: Manifest) -> set[str]:
    meta = node["metadata"]
    marks = set(loss_marks((taint["key"] for taint in node["spec"]["taints"]), meta.get("labels", {})))
    # Another version of a notice may have another deadline, or take it back.
    notice = {meta.get("annotations", {}).get(ANNOTATION_NOTICE)} - {None}
    ready = any(each["status"] == "True" for each in node["status"]["conditions"])
    found = {"deleting": "deletionTimestamp" in meta, "not ready": not ready}
    return marks | notice | {name for name, holds in found.items() if holds}
