"""A PodGroup for each job, by which the scheduler gives it the nodes of nodes.min at once, or none.

Kubernetes has them as a beta from 1.37 on, behind the feature gate GenericWorkload.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from datetime import datetime

from spottrain_api.contract.names import API_VERSION, KIND, LABEL_JOB, LABEL_JOB_UID, LABEL_MANAGED_BY, MANAGED_BY
from spottrain_operator.core.model import JobView, PodView
from spottrain_operator.kube.cluster import Cluster
from spottrain_operator.kube.errors import AlreadyExistsError, NotFoundError, RefusedError
from spottrain_operator.kube.resources import POD_GROUPS, Manifest
from spottrain_operator.kube.retry import Retry

_SINGLY = (
    "Its pods get nodes one by one, so that two jobs may each hold a part of the nodes that they need for a while"
)
_MISSING = (
    f"This cluster serves no PodGroups of {POD_GROUPS.group}/{POD_GROUPS.version}. {_SINGLY}. Kubernetes has them "
    "from 1.37 on, with the feature gate GenericWorkload on API server, controller manager and scheduler: switch it "
    "on, or set the chart's value jobs.podGroups to false"
)


def group_name(job: JobView) -> str:
    """The name of the job's PodGroup.

    All pods of a group need its priority and one scheduler, and a group can't change its priority.
    """
    template = job.spec.pod_template
    content = json.dumps([job.uid, template.priority_class_name, template.scheduler_name])
    return f"{job.name}-{hashlib.sha256(content.encode()).hexdigest()[:8]}"


def pod_group(job: JobView) -> Manifest:
    """The PodGroup of a job. Kubernetes deletes it with the job, once no pod is in it."""
    priority = job.spec.pod_template.priority_class_name
    return {
        "apiVersion": f"{POD_GROUPS.group}/{POD_GROUPS.version}",
        "kind": "PodGroup",
        "metadata": {
            "namespace": job.namespace,
            "name": group_name(job),
            "labels": {LABEL_JOB: job.name, LABEL_JOB_UID: job.uid, LABEL_MANAGED_BY: MANAGED_BY},
            "ownerReferences": [
                {"apiVersion": API_VERSION, "kind": KIND, "name": job.name, "uid": job.uid, "controller": True}
            ],
        },
        "spec": _policy(job) | ({"priorityClassName": priority} if priority else {}),
    }


def _policy(job: JobView) -> Manifest:
    return {"schedulingPolicy": {"gang": {"minCount": job.spec.nodes.min}}}


@dataclass(slots=True, kw_only=True)
class GroupState:
    """What is known of one job's PodGroup.

    Attributes:
        name: The one that is there. Empty: none that is known.
        min_count: How many of its pods get nodes together.
        retry: When to write it again, if that is refused.
    """

    name: str = ""
    min_count: int = 0
    retry: Retry = field(default_factory=Retry)


class PodGroups:
    """Keeps each job's PodGroup as nodes.min is. While there can't be one, pods are scheduled one by one."""

    def __init__(self, cluster: Cluster) -> None:
        self._cluster = cluster

    async def keep(self, job: JobView, state: GroupState, now: datetime, *, before_pods: bool) -> str:
        """Write the PodGroup if it is not known to be right, and each time before pods are created.

        Returns:
            Why there can't be one, the first time in a row. Otherwise empty.
        """
        name, least = group_name(job), job.spec.nodes.min
        is_right = (state.name, state.min_count) == (name, least)
        if (is_right and not before_pods) or not state.retry.is_due(now):
            return ""
        try:
            await self._write(job, name, is_right=is_right)
        except NotFoundError:
            state.name = ""
            return _MISSING if state.retry.note_refusal(now) else ""
        except RefusedError as error:
            state.name = name if state.name == name else ""
            return f"Its PodGroup can't be written: {error}. {_SINGLY}" if state.retry.note_refusal(now) else ""
        state.retry.note_success()
        state.name, state.min_count = name, least
        return ""

    async def _write(self, job: JobView, name: str, *, is_right: bool) -> None:
        try:
            await self._cluster.create(POD_GROUPS, pod_group(job))
        except AlreadyExistsError:
            if not is_right:
                await self._cluster.patch(POD_GROUPS, name, {"spec": _policy(job)}, namespace=job.namespace)


def group_to_join(job: JobView, state: GroupState, pods: Sequence[PodView]) -> str:
    """The PodGroup of the job's next pods. Empty: none.

    All of the job's pods are in it, or none is. The scheduler would wait for ever for as many pods as nodes.min if
    some of them are in no group, or in another one.
    """
    groups = {pod.group for pod in pods if not pod.deleting and pod.phase in ("Pending", "Running")}
    if not groups:
        return state.name
    return group_name(job) if groups == {group_name(job)} else ""
