"""What a job's queue says: its Workloads, and why there can't be any."""

from __future__ import annotations

from datetime import datetime

from spottrain_api.contract.conditions import ConditionReason
from spottrain_api.contract.names import LABEL_JOB, LABEL_JOB_UID, LABEL_PART, LABEL_QUEUE
from spottrain_operator.core.model import JobView
from spottrain_operator.core.trouble import Trouble
from spottrain_operator.core.workloads import (
    CreateWorkload,
    DeleteWorkload,
    FinishWorkload,
    QueueView,
    ReadyWorkload,
    ReleaseWorkload,
    WorkloadAction,
)
from spottrain_operator.kube.cluster import Cluster
from spottrain_operator.kube.errors import NotFoundError, RefusedError
from spottrain_operator.kube.identities import JobKey
from spottrain_operator.kube.resources import WORKLOADS, Manifest
from spottrain_operator.objects.installed import Product, Troubles
from spottrain_operator.objects.placement import DEFAULT_SITE, Site
from spottrain_operator.objects.workloads import (
    content_of,
    create_workload,
    finish_workload,
    release_workload,
    report_ready,
    trimmed_workload,
    workload_view,
)

KUEUE = Product(
    name="Kueue",
    resource=WORKLOADS,
    oldest="0.15",
    missing=ConditionReason.KUEUE_MISSING,
    too_old=ConditionReason.KUEUE_TOO_OLD,
    refused=ConditionReason.WORKLOAD_REFUSED,
    instead=f"remove the job's label {LABEL_QUEUE} to run it without a queue",
    cannot="no quota can be asked for",
)


class Queues:
    """Observes the queues of jobs, and does what the core decides about their Workloads.

    Args:
        cluster: Reads and writes.
        site: What the administrator says, for all jobs: also whether jobs may wait in queues.
    """

    def __init__(self, cluster: Cluster, site: Site = DEFAULT_SITE) -> None:
        self._cluster = cluster
        self._site = site
        self._troubles = Troubles(cluster, KUEUE)

    async def observe(self, job: JobView) -> QueueView | None:
        """The job's queue; None if it is in none, and has left nothing in one."""
        if not self._site.uses_kueue:
            return QueueView(name=job.queue, trouble=_off(job.queue)) if job.queue else None
        try:
            found = await self._workloads(JobKey.of_view(job))
        except (NotFoundError, RefusedError) as error:
            return QueueView(name=job.queue, trouble=await self._troubles.why(error)) if job.queue else None
        own = [each for each in found if each["metadata"]["labels"].get(LABEL_JOB_UID) == job.uid]
        for each in found:
            if each not in own:  # of an earlier job of this name, which was orphaned
                await self._delete(job.namespace, each["metadata"]["name"], each["metadata"]["uid"])
        if not (own or job.queue):
            return None
        return QueueView(
            name=job.queue,
            content=content_of(job, self._site) if job.queue else "",
            workloads=tuple(workload_view(each) for each in own if "deletionTimestamp" not in each["metadata"]),
            trouble=self._troubles.of(JobKey.of_view(job)),
        )

    async def act(self, job: JobView, action: WorkloadAction, now: datetime) -> None:
        """Do one action. A second time, it changes nothing.

        A Workload that is refused doesn't fail the pass: the job says why it waits, and the next pass tries again.
        """
        match action:
            case CreateWorkload():
                creating = create_workload(self._cluster, job, action, self._site)
                await self._troubles.note(JobKey.of_view(job), creating)
            case ReadyWorkload():
                await report_ready(self._cluster, job, action.name, action.uid, now)
            case ReleaseWorkload():
                await release_workload(self._cluster, job, action.name, action.uid, now)
            case FinishWorkload():
                await finish_workload(
                    self._cluster,
                    job,
                    action.name,
                    action.uid,
                    succeeded=action.succeeded,
                    message=action.message,
                    now=now,
                )
            case DeleteWorkload():
                await self._delete(job.namespace, action.name, action.uid)

    async def give_all_back(self, key: JobKey) -> None:
        """Delete the Workloads of a job that is gone. Kubernetes does so late, or not at all if they are orphaned."""
        self._troubles.forget(key)
        if not self._site.uses_kueue:
            return
        try:
            found = await self._workloads(key)
        except (NotFoundError, RefusedError):
            return  # there are none, or this operator may not see any
        for each in found:
            await self._delete(key.namespace, each["metadata"]["name"], each["metadata"]["uid"])

    async def _workloads(self, key: JobKey) -> list[Manifest]:
        found = await self._cluster.list(
            WORKLOADS, namespace=key.namespace, labels={LABEL_JOB: key.name}, keep=trimmed_workload
        )
        return [each for each in found.items if LABEL_PART in each["metadata"]["labels"]]

    async def _delete(self, namespace: str, name: str, uid: str) -> None:
        await self._cluster.delete(WORKLOADS, name, namespace=namespace, uid=uid)


def _off(queue: str) -> Trouble:
    return Trouble(
        reason=ConditionReason.KUEUE_OFF,
        message=f"it asks for queue {queue} ({LABEL_QUEUE}), and the operator doesn't use Kueue: set the chart's "
        "value kueue.enabled, or remove the label to run the job without a queue",
    )
