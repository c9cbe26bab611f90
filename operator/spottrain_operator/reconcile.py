"""One pass over one job.

The pass observes, plans, writes the status, publishes assignments, acts, and records events.

The order matters. Assignments follow from the status that the API server has accepted, so that a new operator finds
every decision on which an agent may have acted. No other write stands before them: once they are published, the pass
lets those of other jobs go first. If a pass fails halfway, the next one observes afresh and reaches the same result.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
from collections.abc import Callable, Sequence
from dataclasses import replace
from datetime import datetime

from spottrain_api.contract.assignments import Assignment, AssignmentAction, Relay
from spottrain_api.contract.conditions import ConditionReason, ConditionType, EventReason
from spottrain_api.contract.names import KIND, LABEL_JOB, LABEL_JOB_UID
from spottrain_api.contract.nodes import shutdown_grace_seconds
from spottrain_api.v1alpha1.status import FINISHED_PHASES, Condition, GenerationState, Phase, TrainingJobStatus
from spottrain_operator.control_api.agents import AssignmentBoard, ReportBox
from spottrain_operator.controller import PassResult, Published
from spottrain_operator.core.assignments import assignments_for, relays_for
from spottrain_operator.core.model import (
    Action,
    AnnotatePod,
    CreatePod,
    Event,
    JobView,
    Observed,
    Plan,
    PodView,
)
from spottrain_operator.core.node_pools import NodePoolAction
from spottrain_operator.core.policies.understanding import sentence
from spottrain_operator.core.timing import DEFAULT_TIMING, Timing
from spottrain_operator.core.workloads import WorkloadAction
from spottrain_operator.job_record import JobRecord
from spottrain_operator.kube.cluster import Cluster
from spottrain_operator.kube.errors import RefusedError
from spottrain_operator.kube.identities import JobKey
from spottrain_operator.kube.resources import JOBS, NODES, PODS, Manifest
from spottrain_operator.metrics import Metrics
from spottrain_operator.objects.apply import apply
from spottrain_operator.objects.claims import RivalFinder
from spottrain_operator.objects.control_address import ControlAddress, with_old_address
from spottrain_operator.objects.costs import CostKeeper
from spottrain_operator.objects.events import EventRecorder
from spottrain_operator.objects.history import HistoryKeeper
from spottrain_operator.objects.isolation import Isolation
from spottrain_operator.objects.kept_away import kept_away
from spottrain_operator.objects.node_holders import NodeHolders
from spottrain_operator.objects.node_pool_keeper import NodePoolKeeper
from spottrain_operator.objects.observe import (
    NotUnderstoodError,
    job_status,
    job_view,
    node_view,
    orphans_pods,
    owned_by,
    pod_view,
)
from spottrain_operator.objects.placement import DEFAULT_SITE, Site
from spottrain_operator.objects.pod_events import PodEvents
from spottrain_operator.objects.pod_groups import PodGroups, group_to_join
from spottrain_operator.objects.pods import annotate_pod, template_hash
from spottrain_operator.objects.profiles import ProfileFinder
from spottrain_operator.objects.queues import Queues
from spottrain_operator.objects.waiting_jobs import WaitingJobs
from spottrain_operator.objects.write_back import as_written, with_condition
from spottrain_operator.refusals import note_refusal, note_unprotected, protects
from spottrain_operator.tracing import ChangeTracer
from spottrain_runtime.logs import about

logger = logging.getLogger(__name__)

Planner = Callable[[Observed, datetime], Plan]


async def _alone(*, trains: bool) -> None:
    """No other pass is under way."""


class Reconciler:
    """Makes the passes.

    `plan` decides; the rest reads what it needs and does what it decided.
    """

    def __init__(
        self,
        *,
        plan: Planner,
        cluster: Cluster,
        tainted_nodes: Callable[[], Sequence[Manifest]],
        board: AssignmentBoard,
        reports: ReportBox,
        metrics: Metrics,
        tracer: ChangeTracer,
        history: HistoryKeeper,
        isolation: Isolation | None = None,
        control: Callable[[], ControlAddress],
        now: Callable[[], datetime],
        listening_since: Callable[[], datetime],
        site: Site = DEFAULT_SITE,
        timing: Timing = DEFAULT_TIMING,
    ) -> None:
        self._plan = plan
        self._timing = timing
        self._cluster = cluster
        self._tainted_nodes = tainted_nodes
        self._board = board
        self._reports = reports
        self._events = EventRecorder(cluster)
        self._pod_events = PodEvents(cluster, timing)
        self._rivals = RivalFinder(cluster)
        self._waiting = WaitingJobs()
        self._holders = NodeHolders()
        self._metrics = metrics
        self._tracer = tracer
        self._history = history
        self._costs = CostKeeper(cluster)
        self._profiles = ProfileFinder(cluster)
        self._isolation = isolation
        self._queues = Queues(cluster, site)
        self._node_pools = NodePoolKeeper(cluster, site)
        self._groups = PodGroups(cluster)
        self._control = control
        self._site = site
        self._now = now
        self._listening_since = listening_since
        self._key = secrets.token_bytes(32)
        self._records: dict[JobKey, JobRecord] = {}

    async def reconcile(self, key: JobKey, published: Published = _alone) -> PassResult:
        """Make one pass over the job.

        Args:
            key: The job.
            published: Called once the agents have their assignments. What follows can wait.

        Raises:
            ClusterError: The pass failed halfway and has to be repeated.
        """
        job = await self._cluster.get(JOBS, key.name, namespace=key.namespace)
        if job is None:
            await self._clean_up(key, published)
            return PassResult(gone=True)
        record = await self._record_of(key, job["metadata"]["uid"])
        pods = await self._pods(key, job)
        try:
            view = job_view(job)
        except NotUnderstoodError as error:
            if "deletionTimestamp" in job["metadata"]:
                await self._clean_up(key, published, keeps_pods=orphans_pods(job))
                return PassResult(gone=True)
            await self._give_address(key, pods)
            return await self._leave_alone(job, error)
        observed = await self._observe(key, record, view, pods)
        decided = self._plan(observed, self._now())
        job, written = await self._write_status(job, view, decided.status)
        record.held = decided.held
        if view.deleting and not pods:
            await self._clean_up(key, published)  # only the finalizers of others keep it
            return PassResult(gone=True)
        await self._assign(key, written, observed)
        generation = decided.status.generation
        await published(trains=generation is not None and generation.state is GenerationState.ACTIVE)
        failure: Exception | None = None
        try:
            if self._isolation is not None and decided.status.phase not in FINISHED_PHASES:
                await self._isolation.isolate(job, record.isolation, self._now())
            if self._site.groups_pods and decided.status.phase not in FINISHED_PHASES:
                await self._group(record, job, written, decided.actions)
            group = group_to_join(written, record.group, observed.pods)
            await self._apply(key, record, job, written, decided.actions, group)
            await self._give_address(key, pods)
        except Exception as error:
            failure = error  # the status has the decision: no later pass makes it again, and records it
        with about(generation=generation.number if generation is not None else None):
            for event in decided.events:
                await self._events.record(job, event)
        self._metrics.passed(key, observed, decided.status)
        self._tracer.passed(key, record.requests, observed, decided.status)
        await self._history.keep(job, record.course, decided.status, self._now())
        await self._costs.keep(key, record.uid, record.spending, decided.status, self._now())
        if failure is not None:
            raise failure
        return PassResult(requeue_after=decided.requeue_after)

    async def _record_of(self, key: JobKey, uid: str) -> JobRecord:
        record = self._records.get(key)
        if record is not None and record.uid != uid:
            await self._close(key)  # deleted and created anew between two passes
            record = None
        if record is None:
            record = self._records[key] = JobRecord(uid=uid)
        return record

    async def _assign(self, key: JobKey, job: JobView, observed: Observed) -> None:
        if job.deleting:
            await self._assign_exit(key)
        else:
            self._board.publish(key, self._assignments(job, observed))

    def _assignments(self, job: JobView, observed: Observed) -> dict[str, Assignment]:
        assigned = assignments_for(job, [pod.uid for pod in observed.pods], self._key)
        relays = relays_for(job, observed.reports)
        return {pod.uid: _placed(assigned[pod.uid], pod, observed, relays.get(pod.uid)) for pod in observed.pods}

    async def _pods(self, key: JobKey, job: Manifest) -> list[Manifest]:
        uid = job["metadata"]["uid"]
        labels = {LABEL_JOB: key.name, LABEL_JOB_UID: uid}
        labelled = await self._cluster.list(PODS, namespace=key.namespace, labels=labels)
        pods = [pod for pod in labelled.items if owned_by(pod, uid)]
        self._reports.keep(key, frozenset(pod["metadata"]["uid"] for pod in pods))
        return pods

    async def _give_address(self, key: JobKey, pods: Sequence[Manifest]) -> None:
        """Give agents a new address or authority of the control API.

        They can't hear it over the old one.
        """
        control = self._control()

        async def annotate(name: str, uid: str) -> None:
            try:
                await annotate_pod(self._cluster, key.namespace, name, uid=uid, annotations=control.annotations)
            except RefusedError as error:
                logger.warning("%s: its pod %s can't be given the control API's new address: %s", key, name, error)

        behind = [pod["metadata"] for pod in with_old_address(pods, control)]
        await asyncio.gather(*(annotate(meta["name"], meta["uid"]) for meta in behind))

    async def _observe(self, key: JobKey, record: JobRecord, job: JobView, pods: Sequence[Manifest]) -> Observed:
        listening_since = self._listening_since()
        self._waiting.note(job)
        found = sorted((pod_view(pod) for pod in pods), key=lambda pod: pod.sequence)
        self._holders.note(job, found)
        uids = frozenset(pod.uid for pod in found)
        views = await self._pod_events.explained(key, record.troubles, found, self._now())
        names = sorted({pod.node for pod in views if pod.node})
        nodes = await asyncio.gather(*(self._cluster.get(NODES, name) for name in names))
        unplaced = [pod for pod in views if pod.unschedulable_since is not None]
        return Observed(
            job=job,
            pods=views,
            nodes={name: node_view(node) for name, node in zip(names, nodes, strict=True) if node is not None},
            # While the lease was away, nobody could be heard.
            reports={uid: v for uid, v in self._reports.of(uids).items() if v.last_contact >= listening_since},
            refused_reports=self._reports.refused(uids),
            kept_away=kept_away(unplaced, job.spec, self._tainted_nodes(), self._site) if unplaced else {},
            template_hash=template_hash(job.spec),
            listening_since=listening_since,
            timing=self._timing,
            refusal=record.refusal,
            rival=await self._rivals.rival_of(job),
            profile=await self._profiles.profile_of(job, self._now()),
            queue=await self._queues.observe(job),
            node_pools=await self._node_pools.observe(job),
            num_younger_waiting=self._waiting.num_younger(job),
            holders=self._holders.others(job),
            held_before=record.held,
        )

    async def _write_status(
        self, job: Manifest, view: JobView, status: TrainingJobStatus
    ) -> tuple[Manifest, JobView]:
        """Write the status if it differs from the one that was read.

        Returns:
            The job as the API server has it then, and its view. All but the status is as it was read: if anything
            else had been written meanwhile, this write would have been a conflict.
        """
        found = job.get("status") or {}
        if found and view.status == status:
            return job, view
        new = job | {"status": as_written(status, view.status, found)}
        job = await self._cluster.replace(JOBS, new, subresource="status")
        return job, replace(view, status=job_status(job))

    async def _group(self, record: JobRecord, job: Manifest, view: JobView, actions: Sequence[Action]) -> None:
        """Keep the job's PodGroup, and say once why there is none."""
        before_pods = any(isinstance(action, CreatePod) for action in actions)
        if said := await self._groups.keep(view, record.group, self._now(), before_pods=before_pods):
            event = Event(type="Warning", reason=EventReason.PODS_NOT_GROUPED.value, message=said)
            await self._events.record(job, event)

    async def _apply(
        self,
        key: JobKey,
        record: JobRecord,
        job: Manifest,
        view: JobView,
        actions: Sequence[Action],
        group: str,
    ) -> None:
        """Do all actions concurrently. One that fails doesn't stop the others. New pods join the PodGroup `group`.

        A refused pod doesn't fail the pass, so that the job's running pods are looked after as before.
        """
        if not record.annotating.is_due(self._now()):
            actions = [action for action in actions if not protects(action)]
        doing = [self._do(view, action, group) for action in actions]
        results = await asyncio.gather(*doing, return_exceptions=True)
        failed = [(a, e) for a, e in zip(actions, results, strict=True) if isinstance(e, BaseException)]
        refusals = [(a, e) for a, e in failed if isinstance(a, CreatePod) and isinstance(e, RefusedError)]
        refused = [error for _, error in refusals]
        if tried := {action.capacity_type for action in actions if isinstance(action, CreatePod)}:
            errors = {action.capacity_type: error for action, error in refusals}
            note_refusal(record, view, tried, errors, self._now())
        unprotected = [e for action, e in failed if isinstance(action, AnnotatePod) and isinstance(e, RefusedError)]
        if unprotected or any(map(protects, actions)):
            note_unprotected(key, record, unprotected[0] if unprotected else None, self._now())
        for error in refused:
            message = f"A pod can't be created; the operator retries: {error}"
            await self._events.record(
                job, Event(type="Warning", reason=EventReason.POD_NOT_CREATED.value, message=message)
            )
        for _, failure in failed:
            if failure not in refused and failure not in unprotected:
                raise failure

    async def _do(self, job: JobView, action: Action, group: str) -> None:
        if isinstance(action, WorkloadAction):
            await self._queues.act(job, action, self._now())
        elif isinstance(action, NodePoolAction):
            await self._node_pools.act(job, action)
        else:
            await apply(self._cluster, job, action, control=self._control(), site=self._site, group=group)

    async def _leave_alone(self, job: Manifest, error: NotUnderstoodError) -> PassResult:
        """Report that this version can't manage the job, which a newer one wrote.

        Its pods and agents continue.
        """
        found = job.get("status") or {}
        if found.get("phase") in FINISHED_PHASES:
            return PassResult()
        begun = "generation" in found
        message = sentence(
            error.fields, "The operator leaves the job alone, and its pods continue," if begun else "The job waits"
        )
        condition = Condition(
            type=ConditionType.SPEC_NOT_UNDERSTOOD.value,
            status="True",
            reason=ConditionReason.NEWER_VERSION.value,
            message=message,
            last_transition_time=self._now(),
        )
        status = with_condition(found, condition)
        if not begun:
            status |= {"phase": Phase.PENDING.value, "message": message}
        if status != found:
            job = await self._cluster.replace(JOBS, job | {"status": status}, subresource="status")
            await self._events.record(
                job, Event(type="Warning", reason=EventReason.SPEC_NOT_UNDERSTOOD.value, message=message)
            )
        return PassResult()

    async def _clean_up(self, key: JobKey, published: Published, *, keeps_pods: bool = False) -> None:
        """Delete the pods of a deleted job.

        Kubernetes does so too, but may start half a minute late for a new CRD.

        The agents are assigned to exit. On SIGTERM alone they would drain, for a job that no longer exists.
        """
        pods = await self._assign_exit(key)
        await published(trains=False)
        for meta in pods if not keeps_pods else ():
            if "deletionTimestamp" not in meta:
                await self._cluster.delete(PODS, meta["name"], namespace=key.namespace, uid=meta["uid"])
        await self._queues.give_all_back(key)
        await self._node_pools.delete_all(key)
        await self._close(key)

    async def _assign_exit(self, key: JobKey) -> list[Manifest]:
        """Assign all agents of a deleted job to exit.

        Those of pods that it owned until now exit, too: after a deletion with `--cascade=orphan`, nobody looks after
        them. Labels alone prove nothing, but an assignment does.

        Returns:
            The metadata of the pods that it owns.
        """
        labelled = await self._cluster.list(PODS, namespace=key.namespace, labels={LABEL_JOB: key.name})
        pods = [pod["metadata"] for pod in labelled.items]
        owned = [meta for meta in pods if _is_owned_by_name(meta, key.name)]
        uids = {meta["uid"] for meta in pods if meta in owned or self._board.has_decided(meta["uid"])}
        self._reports.keep(key, frozenset(uids))
        self._board.publish(key, dict.fromkeys(uids, Assignment(action=AssignmentAction.EXIT)))
        return owned

    def leave(self, key: JobKey, job: Manifest | None) -> None:
        """Drop what is kept of a job that this release doesn't lead.

        The release may soon lead the job again. So reports and assignments stay: its agents, which have nothing new
        to report, would seem silent. Its claim is kept up to date for the others at its folder, whose passes may come
        first then.

        Args:
            key: The job.
            job: None if the release never leads it again.
        """
        self._forget(key)
        if job is None:
            self._reports.keep(key, frozenset())
            self._board.publish(key, {})
        else:
            self._rivals.note(job)

    async def _close(self, key: JobKey) -> None:
        """Record what a deleted job cost, and forget the job."""
        record = self._records.get(key)
        if record is not None:
            await self._costs.write(key, record.uid, record.spending, self._now())
        self._forget(key)

    def _forget(self, key: JobKey) -> None:
        """Drop what is kept of a job, which holds for no other of its name."""
        self._records.pop(key, None)
        self._rivals.forget(key)
        self._waiting.forget(key)
        self._holders.forget(key)
        self._metrics.forget(key)


def _is_owned_by_name(meta: Manifest, job: str) -> bool:
    return any(owner["kind"] == KIND and owner["name"] == job for owner in meta.get("ownerReferences", ()))


def _placed(assigned: Assignment, pod: PodView, observed: Observed, relay: Relay | None) -> Assignment:
    """The assignment with its relay and with what its pod's node shows."""
    node = observed.nodes.get(pod.node or "")
    seen = {
        "shutdown_grace_seconds": shutdown_grace_seconds(node.labels) if node is not None else None,
        "watcher": node.watcher if node is not None else "",
        "relay": relay,
    }
    return assigned.model_copy(update=seen)
