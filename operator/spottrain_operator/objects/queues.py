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
from spottrain_operator.kube.errors import AlreadyExistsError, NotFoundError, RefusedError
from spottrain_operator.kube.identities import JobKey
from spottrain_operator.kube.resources import WORKLOADS, Manifest
from spottrain_operator.objects.installed import definition_of, served_versions
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

OLDEST_KUEUE = "0.15"


class Queues:
    """Observes the queues of jobs, and does what the core decides about their Workloads.

    Args:
        cluster: Reads and writes.
        site: What the administrator says, for all jobs: also whether jobs may wait in queues.
    """

    def __init__(self, cluster: Cluster, site: Site = DEFAULT_SITE) -> None:
        self._cluster = cluster
        self._site = site
        self._refusals: dict[JobKey, Trouble] = {}

    async def observe(self, job: JobView) -> QueueView | None:
        """The job's queue; None if it is in none, and has left nothing in one."""
        if not self._site.uses_kueue:
            return QueueView(name=job.queue, trouble=_off(job.queue)) if job.queue else None
        try:
            found = await self._workloads(JobKey.of_view(job))
        except NotFoundError:
            return QueueView(name=job.queue, trouble=await self._missing()) if job.queue else None
        except RefusedError as error:
            return QueueView(name=job.queue, trouble=_refused(error)) if job.queue else None
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
            trouble=self._refusals.get(JobKey.of_view(job)),
        )

    async def act(self, job: JobView, action: WorkloadAction, now: datetime) -> None:
        """Do one action. A second time, it changes nothing.

        A Workload that is refused doesn't fail the pass: the job says why it waits, and the next pass tries again.
        """
        match action:
            case CreateWorkload():
                await self._create(job, action)
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
        self._refusals.pop(key, None)
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

    async def _create(self, job: JobView, action: CreateWorkload) -> None:
        key = JobKey.of_view(job)
        try:
            await create_workload(self._cluster, job, action, self._site)
        except AlreadyExistsError:
            return
        except NotFoundError:
            self._refusals[key] = await self._missing()
        except RefusedError as error:
            self._refusals[key] = _refused(error)
        else:
            self._refusals.pop(key, None)

    async def _delete(self, namespace: str, name: str, uid: str) -> None:
        await self._cluster.delete(WORKLOADS, name, namespace=namespace, uid=uid)

    async def _missing(self) -> Trouble:
        """Why there is no such resource."""
        versions = await served_versions(self._cluster, WORKLOADS)
        if not versions:
            return Trouble(
                reason=ConditionReason.KUEUE_MISSING,
                message=f"Kueue is not installed in this cluster: install version {OLDEST_KUEUE} or newer, or remove "
                f"the job's label {LABEL_QUEUE} to run it without a queue",
            )
        return Trouble(
            reason=ConditionReason.KUEUE_TOO_OLD,
            message=f"this cluster's Kueue serves {definition_of(WORKLOADS)} in {', '.join(versions)}, and "
            f"spottrain needs {WORKLOADS.version}: install Kueue {OLDEST_KUEUE} or newer",
        )


def _off(queue: str) -> Trouble:
    return Trouble(
        reason=ConditionReason.KUEUE_OFF,
        message=f"it asks for queue {queue} ({LABEL_QUEUE}), and the operator doesn't use Kueue: set the chart's "
        "value kueue.enabled, or remove the label to run the job without a queue",
    )


def _refused(error: RefusedError) -> Trouble:
    return Trouble(reason=ConditionReason.WORKLOAD_REFUSED, message=f"no quota can be asked for: {error}")
