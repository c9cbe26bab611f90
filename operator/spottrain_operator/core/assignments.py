"""What each agent is told: a pure function of the job as it is written, never of what is only planned.

An agent that acts on an assignment therefore acts on something that a new operator will find again.
"""

from __future__ import annotations

from datetime import timedelta

from spottrain_api.contract import (
    Assignment,
    AssignmentAction,
    CheckpointConfig,
    DeepSpeedConfig,
    DrainRequest,
    Entrypoint,
    FsdpConfig,
    GenerationAssignment,
    Interruptions,
    StabilityConfig,
    TrainerConfig,
)
from spottrain_api.v1alpha1 import FINISHED_PHASES, GenerationState, GenerationStatus

from .causes import PREEMPTIONS
from .memory import peer_memory
from .model import JobView
from .timing import MAX_TRANSITIONS, seconds_between

_DEFAULT_DRAIN = timedelta(seconds=60)


def assignment_for(job: JobView, pod_uid: str, key: bytes = b"") -> Assignment:
    """The assignment of the pod `pod_uid`; `job.status` must be what the API server has. `key` is the operator's
    secret, from which the tokens of peers' memory are made.

    Pods that aren't in the newest generation WAIT. Once a job is finished, all agents EXIT.
    """
    status = job.status
    if status.phase in FINISHED_PHASES:
        return Assignment(action=AssignmentAction.EXIT)
    generation = status.generation
    if generation is None:
        return Assignment(action=AssignmentAction.WAIT)
    node_rank = next((m.node_rank for m in generation.members if m.pod_uid == pod_uid), None)
    if node_rank is None:
        return Assignment(action=AssignmentAction.WAIT)
    told = _as_told(job, generation, node_rank, key)
    if generation.state is GenerationState.ACTIVE:
        return Assignment(action=AssignmentAction.RUN, generation=told)
    if generation.state is GenerationState.DRAINING:
        return Assignment(action=AssignmentAction.DRAIN, generation=told, drain=_drain_request(generation))
    # STOPPING; or ENDED, where it reaches a member that was silent when the others ended.
    return Assignment(action=AssignmentAction.STOP, generation=told)


def _drain_request(generation: GenerationStatus) -> DrainRequest:
    requested_at = generation.requested_at or generation.started_at
    return DrainRequest(
        reason=generation.reason or "Drain",
        requested_at=requested_at,
        deadline=generation.deadline or requested_at + _DEFAULT_DRAIN,
        is_preemption=generation.reason in PREEMPTIONS,
    )


def _interruptions(job: JobView, generation: GenerationStatus) -> Interruptions:
    """Of the transitions before `generation`, so that it stays the same while that runs."""
    before = [t for t in job.status.transitions if t.generation < generation.number and t.reason in PREEMPTIONS]
    # What memory covered counts as a loss again where the job doesn't ask for replicas any more.
    covers = job.spec.checkpoint.peer_replicas > 0
    since = job.status.start_time or generation.started_at
    if len(job.status.transitions) == MAX_TRANSITIONS:
        since = job.status.transitions[0].at  # older ones are forgotten
    return Interruptions(
        num=len(before),
        num_noticed=sum(t.with_notice for t in before),
        num_covered=sum(covers and t.from_memory and not t.with_notice for t in before),
        observed_seconds=max(0.0, seconds_between(since, generation.started_at)),
    )


def _as_told(job: JobView, generation: GenerationStatus, node_rank: int, key: bytes) -> GenerationAssignment:
    spec = job.spec
    return GenerationAssignment(
        number=generation.number,
        rendezvous_id=generation.rendezvous_id,
        rendezvous_endpoint=generation.rendezvous_endpoint,
        node_rank=node_rank,
        num_nodes=len(generation.members),
        processes_per_node=spec.processes_per_node,
        entrypoint=Entrypoint(
            script=spec.entrypoint.script,
            module=spec.entrypoint.module,
            args=spec.entrypoint.args,
            working_dir=spec.entrypoint.working_dir,
        ),
        trainer=TrainerConfig(
            job=job.name,
            namespace=job.namespace,
            generation=generation.number,
            attempt_id=generation.rendezvous_id,
            seed=spec.seed,
            strategy=spec.strategy.value,
            precision=spec.precision.value,
            min_world_size=spec.nodes.min * spec.processes_per_node,
            activation_checkpointing=spec.activation_checkpointing,
            compile=spec.compile,
            fsdp=FsdpConfig(
                sharding=spec.fsdp.sharding.value,
                reshard_after_forward=spec.fsdp.reshard_after_forward,
                offload=spec.fsdp.offload,
            ),
            deepspeed=DeepSpeedConfig(
                zero_stage=spec.deepspeed.zero_stage,
                offload_optimizer=spec.deepspeed.offload_optimizer,
                offload_parameters=spec.deepspeed.offload_parameters,
                config=spec.deepspeed.config.to_dict(),
            ),
            global_batch=spec.batch.global_,
            micro_batch=spec.batch.micro,
            checkpoint=CheckpointConfig(
                uri=spec.checkpoint.uri,
                interval=spec.checkpoint.interval,
                keep=spec.checkpoint.keep,
                keep_every=spec.checkpoint.keep_every,
                on_notice=spec.checkpoint.on_notice.value,
                interruptions=_interruptions(job, generation),
                endpoint_url=spec.checkpoint.endpoint_url,
            ),
            stability=StabilityConfig.model_validate(spec.stability.to_dict())
            if spec.stability is not None
            else None,
            resume=generation.resume,
            memory=peer_memory(job, node_rank, key),
        ),
    )
