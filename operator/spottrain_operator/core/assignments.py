"""Assignments for agents: a pure function of the job as the API server has it.

They never depend on changes that are only planned. So a new operator finds everything that an agent acts on.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from datetime import timedelta
from typing import Any

from spottrain_api.contract.assignments import Assignment, AssignmentAction, GenerationAssignment, Relay
from spottrain_api.contract.causes import Cause
from spottrain_api.contract.configuration import DrainRequest, Interruptions, TrainerConfig
from spottrain_api.settings.training import TrainingSettings
from spottrain_api.v1alpha1.status import FINISHED_PHASES, GenerationState, GenerationStatus, TrainingJobStatus
from spottrain_operator.core.facts.causes import PREEMPTIONS
from spottrain_operator.core.facts.replicas import address_of, replica_settings
from spottrain_operator.core.model import MAX_TRANSITIONS, JobView, ReportView
from spottrain_operator.core.timing import seconds_between

_DEFAULT_DRAIN = timedelta(seconds=60)
_KEEP_ALL = {"keep": 1000, "keep_every": 1}


def assignments_for(job: JobView, pod_uids: Iterable[str], key: bytes = b"") -> dict[str, Assignment]:
    """The assignments of these pods, by uid.

    Pods that aren't in the newest generation WAIT. Once a job is finished or is being deleted, all agents EXIT.

    Args:
        job: Its `status` must be what the API server has.
        pod_uids: The pods.
        key: The operator's secret, from which it makes the tokens of replicas.
    """
    status, generation = job.status, job.status.generation
    if job.deleting or status.phase in FINISHED_PHASES:
        return {uid: Assignment(action=AssignmentAction.EXIT) for uid in pod_uids}
    if generation is None:
        return {uid: Assignment(action=AssignmentAction.WAIT) for uid in pod_uids}
    ranks = {member.pod_uid: member.node_rank for member in generation.members}
    shared = _shared_by_all(job, generation)
    return {
        uid: _assignment(generation, _of_member(shared, job, ranks[uid], key))
        if uid in ranks
        else Assignment(action=AssignmentAction.WAIT)
        for uid in pod_uids
    }


def assignment_for(job: JobView, pod_uid: str, key: bytes = b"") -> Assignment:
    """The assignment of one pod, as `assignments_for` says."""
    return assignments_for(job, (pod_uid,), key)[pod_uid]


def _assignment(generation: GenerationStatus, assigned: GenerationAssignment) -> Assignment:
    if generation.state is GenerationState.ACTIVE:
        return Assignment(action=AssignmentAction.RUN, generation=assigned)
    if generation.state is GenerationState.DRAINING:
        return Assignment(action=AssignmentAction.DRAIN, generation=assigned, drain=_drain_request(generation))
    # STOPPING; or ENDED, for a member that was silent when the others ended.
    return Assignment(
        action=AssignmentAction.STOP,
        generation=assigned,
        show_stacks=True if generation.reason == Cause.HANG else None,
    )


def relays_for(job: JobView, reports: Mapping[str, ReportView]) -> dict[str, Relay]:
    """The relay of each member of the newest generation that has one, by uid.

    It is the agent of node rank 0, for all others. None has one if rank 0 can't relay or has not reported yet.
    """
    generation = job.status.generation
    if generation is None or not generation.members:
        return {}
    first = min(generation.members, key=lambda member: member.node_rank)
    view = reports.get(first.pod_uid)
    if view is None or view.report.relay_port is None or view.report.relay_token is None:
        return {}
    relay = Relay(address=address_of(first.address, view.report.relay_port), token=view.report.relay_token)
    return {member.pod_uid: relay for member in generation.members if member is not first}


def _drain_request(generation: GenerationStatus) -> DrainRequest:
    requested_at = generation.requested_at or generation.started_at
    return DrainRequest(
        reason=generation.reason or "Drain",
        requested_at=requested_at,
        deadline=generation.deadline or requested_at + _DEFAULT_DRAIN,
        is_preemption=generation.reason in PREEMPTIONS,
    )


def _interruptions(job: JobView, generation: GenerationStatus) -> Interruptions:
    """Count the preemptions before `generation`, in the time with members.

    So the counts stay the same while it runs. The assignment of one that stops or has ended has none:
    they would change with the wait after it.
    """
    if generation.state in (GenerationState.STOPPING, GenerationState.ENDED):
        return Interruptions()
    before = [t for t in job.status.transitions if t.generation < generation.number and t.reason in PREEMPTIONS]
    # If the job no longer asks for replicas, the losses that they covered count again.
    covers = job.spec.checkpoint.peer_replicas > 0
    since = job.status.start_time or generation.started_at
    share = _share_with_members(job.status, seconds_between(since, generation.started_at))
    if len(job.status.transitions) == MAX_TRANSITIONS:
        since = job.status.transitions[0].at  # older ones are forgotten
    return Interruptions(
        num=len(before),
        num_noticed=sum(t.with_notice for t in before),
        num_covered=sum(covers and t.from_replicas and not t.with_notice for t in before),
        observed_seconds=max(0.0, share * seconds_between(since, generation.started_at)),
    )


def _share_with_members(status: TrainingJobStatus, elapsed: float) -> float:
    """Share of the time in which the job neither was suspended nor waited for nodes.

    `elapsed` are the seconds since its start.
    """
    if status.time is None or elapsed <= 0:
        return 1.0
    return max(0.0, 1 - (status.time.suspended_seconds + status.time.capacity_seconds) / elapsed)


def _shared_by_all(job: JobView, generation: GenerationStatus) -> GenerationAssignment:
    """What is the same for all members.

    It is most of an assignment, and they share it.
    """
    return GenerationAssignment(
        number=generation.number,
        rendezvous_id=generation.rendezvous_id,
        rendezvous_endpoint=generation.rendezvous_endpoint,
        node_rank=0,
        num_nodes=len(generation.members),
        processes_per_node=job.spec.processes_per_node,
        entrypoint=job.spec.entrypoint,
        trainer=_trainer_config(job, generation).to_dict(),
    )


def _of_member(shared: GenerationAssignment, job: JobView, node_rank: int, key: bytes) -> GenerationAssignment:
    own: dict[str, Any] = {"node_rank": node_rank}
    replicas = replica_settings(job, node_rank, key)
    if replicas is not None:
        settings = replicas.model_dump(mode="json", by_alias=True, exclude_none=True)
        own |= {"trainer": shared.trainer | {"replicas": settings}, "replica_token": replicas.token}
    return shared.model_copy(update=own)


def _trainer_config(job: JobView, generation: GenerationStatus) -> TrainerConfig:
    """The spec's settings for ranks, and the facts about this generation.

    Those about a member are missing.
    """
    settings = {name: getattr(job.spec, name) for name in TrainingSettings.model_fields}
    if not (job.understands("checkpoint.keep") and job.understands("checkpoint.keepEvery")):
        # What a clean-up by the defaults deletes is gone for good.
        settings["checkpoint"] = job.spec.checkpoint.model_copy(update=_KEEP_ALL)
    return TrainerConfig(
        **settings,
        job=job.name,
        namespace=job.namespace,
        generation=generation.number,
        attempt_id=generation.rendezvous_id,
        min_world_size=job.spec.nodes.min * job.spec.processes_per_node,
        max_world_size=job.spec.nodes.max * job.spec.processes_per_node,
        interruptions=_interruptions(job, generation),
        resume=generation.resume,
    )
