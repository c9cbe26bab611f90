"""The operator of the small world: the real `plan` and assignments."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import lru_cache
from typing import Any, NamedTuple

from explorer.store import Committed
from explorer.world import Keyed, Node, Operator, Pod, World
from spottrain_api.contract.assignments import Assignment, CapacityType
from spottrain_api.contract.causes import Cause
from spottrain_api.contract.conditions import ConditionType
from spottrain_api.contract.names import TAINT_PREEMPTION
from spottrain_api.contract.notices import Notice
from spottrain_api.contract.reports import CommitRef
from spottrain_api.v1alpha1.spec import TrainingJobSpec
from spottrain_api.v1alpha1.status import FINISHED_PHASES, GenerationState, TrainingJobStatus
from spottrain_operator.core.assignments import assignment_for
from spottrain_operator.core.model import (
    PROTECTION,
    AnnotatePod,
    CreatePod,
    DeletePod,
    JobView,
    NodeView,
    Observed,
    Plan,
    PodView,
    ReportView,
)
from spottrain_operator.core.plan import plan
from spottrain_simulator.clock import NOT_READY_AFTER, at
from spottrain_simulator.notices import preemption, recommendation
from world.invariants import problems_of
from world.jobs import spec_of


def _spec(max_prewarmed: int) -> TrainingJobSpec:
    return spec_of(
        nodes={"min": 2, "max": 3},
        capacity={"fallback": {"policy": "None"}, "spot": {"maxPrewarmed": max_prewarmed}},
        runPolicy={"hangTimeoutSeconds": 90, "startTimeoutSeconds": 90},
    )


SPEC = _spec(0)
JOB = JobView(
    namespace="default",
    name="job",
    uid="0123456789ab",
    spec=SPEC,
    metadata_generation=1,
    created_at=at(-60),
    status=TrainingJobStatus(last_sequence=3),
)
PREWARMING_JOB = replace(JOB, spec=_spec(1))
GRACE_SECONDS = 30


class Decision(NamedTuple):
    """What a pass writes and does."""

    status: Keyed
    actions: tuple[tuple[Any, ...], ...]
    problem: str | None


def status_key(status: TrainingJobStatus) -> tuple[Any, ...]:
    """What of a status may matter to a later decision, or to an invariant.

    Sentences, costs and the shares of time are left out, and the history except for its end.
    """
    generation, healthy = status.generation, status.condition(ConditionType.CHECKPOINTS_HEALTHY)
    last = status.transitions[-1] if status.transitions else None
    return (
        status.phase.value,
        generation and _generation_key(generation),
        status.commit and (status.commit.generation, status.commit.step),
        status.progress.step,
        status.last_sequence,
        status.failures,
        status.generations_without_progress,
        status.preemptions,
        status.spot_pending_since,
        healthy is not None and healthy.status == "False",
        last and (last.generation, last.last_step, last.resume_step),
        status.accounted_at,  # at the end: the state of the books
    )


def _generation_key(generation: Any) -> tuple[Any, ...]:
    return (
        generation.number,
        generation.state.value,
        generation.reason,
        tuple(member.pod_uid for member in generation.members),
        generation.resume and (generation.resume.generation, generation.resume.step),
        generation.started_at,
        generation.first_step_at,
        generation.requested_at,
        generation.deadline,
        generation.ended_at,
    )


def of_status(status: TrainingJobStatus) -> Keyed:
    return Keyed(status_key(status), status)


@lru_cache(maxsize=4096)
def notice_of(node: str, deadline: int, announced: int, cancelled: bool) -> Notice:
    # What takes a notice back comes after it.
    observed_at = at(announced + 0.5 * cancelled)
    return preemption(node, deadline=at(deadline), observed_at=observed_at, cancelled=cancelled)


def commit_ref(commit: Committed) -> CommitRef:
    return CommitRef(generation=commit.generation, step=commit.step, manifest=commit.manifest, committed_at=at(0))


@lru_cache(maxsize=20_000)
def _pod_view(pod: Pod) -> PodView:
    up = pod.placed is not None and pod.ended is None
    return PodView(
        name=pod.name,
        uid=pod.uid,
        sequence=pod.sequence,
        capacity_type=CapacityType.SPOT,
        template_hash="t1",
        created_at=at(pod.created),
        phase={None: "Running" if up else "Pending", 0: "Succeeded"}.get(pod.ended, "Failed"),
        ready=up,
        exit_code=pod.ended,
        ready_since=at(pod.placed) if up and pod.placed is not None else None,
        node=pod.node,
        scheduled_at=at(pod.placed) if pod.placed is not None else None,
        ip=f"127.0.1.{pod.sequence}" if up else None,
        deleting=pod.deleted_by is not None,
        deletion_deadline=at(pod.deleted_by) if pod.deleted_by is not None else None,
        unschedulable_since=at(pod.created) if pod.node is None else None,
        container_started=pod.placed is not None,
        protection=PROTECTION if pod.protected else {},
    )


@lru_cache(maxsize=20_000)
def _node_view(node: Node, ready: bool) -> NodeView:
    shown = node.shown and node.deadline is not None
    notice = (
        notice_of(node.name, node.deadline, node.announced, node.cancelled)
        if shown and node.deadline is not None
        else None
    )
    if notice is None and node.hinted:
        notice = recommendation(node.name, at(0))
    tainted = shown and not node.cancelled
    return NodeView(name=node.name, ready=ready, notice=notice, taints=(TAINT_PREEMPTION,) if tainted else ())


def _silent_since(node: Node, time: int) -> bool:
    """Whether Kubernetes has noticed that the machine is gone."""
    return node.died is not None and time >= node.died + NOT_READY_AFTER


@lru_cache(maxsize=300_000)
def _decide(
    job: Keyed,
    pods: tuple[Pod, ...],
    nodes: tuple[tuple[Node, bool], ...],
    reports: tuple[tuple[int, Keyed, int], ...],
    since: int,
    time: int,
    *,
    prewarms: bool,
) -> Decision:
    views = {f"u{sequence}": _report_view(report, received) for sequence, report, received in reports}
    observed = Observed(
        job=replace(PREWARMING_JOB if prewarms else JOB, status=job.value),
        pods=tuple(_pod_view(pod) for pod in pods),
        nodes={node.name: _node_view(node, ready) for node, ready in nodes},
        reports=views,
        template_hash="t1",
        listening_since=at(since),
    )
    decided = plan(observed, at(time))
    going = {node.name for node, _ in nodes if node.deadline is not None and not node.cancelled}
    problems = [*_problems(observed, decided, going), *_problems_of_hints(observed, decided, [n for n, _ in nodes])]
    problem = next(iter(problems), None)
    return Decision(of_status(decided.status), tuple(_action(action) for action in decided.actions), problem)


def _problems(observed: Observed, decided: Any, going: set[str]) -> Iterator[str]:
    yield from problems_of(observed, decided, going)
    if decided.status.failures:
        yield "a lost node, or a fault of the store, counts as a failure of the job"


def _problems_of_hints(observed: Observed, decided: Plan, nodes: Sequence[Node]) -> Iterator[str]:
    """A hint may create one pod more than nodes.max, and no more.

    It never ends a generation.
    """
    before, after = observed.job.status.generation, decided.status.generation
    calm = not any(node.deadline is not None or node.died is not None for node in nodes)
    trained = before is not None and before.state is GenerationState.ACTIVE
    if calm and trained and after is not None and after.reason in {Cause.PREEMPTED.value, Cause.GROW.value}:
        yield f"a generation ends ({after.reason}), and no node goes"
    deleted = {action.uid for action in decided.actions if isinstance(action, DeletePod)}
    num_pods = sum(not pod.deleting and pod.uid not in deleted for pod in observed.pods)
    num_pods += sum(isinstance(action, CreatePod) for action in decided.actions)
    if calm and num_pods > observed.job.spec.nodes.max + observed.job.spec.capacity.spot.max_prewarmed:
        yield f"{num_pods} pods"


def _report_view(report: Keyed, received: int) -> ReportView:
    value, since = report.value
    age = max(0.0, received - since) if since is not None else None
    said = value.model_copy(update={"step_age_seconds": age, "sent_at": at(received)})
    return ReportView(report=said, received_at=at(received))


def _action(action: Any) -> tuple[Any, ...]:
    match action:
        case CreatePod(sequence=sequence):
            return ("create", sequence)
        case DeletePod(uid=uid, grace_seconds=grace):
            return ("delete", int(uid[1:]), grace)
        case AnnotatePod(uid=uid, annotations=annotations):
            return ("annotate", int(uid[1:]), any(value is not None for value in annotations.values()))
    raise ValueError(action)


def decide(world: World) -> Decision:
    """What a pass would decide now."""
    operator = world.operator
    known = {pod.sequence for pod in world.pods}
    nodes = tuple((node, not _silent_since(node, world.time)) for node in world.nodes)
    return _decide(
        world.job,
        tuple(pod._replace(agent=None) for pod in world.pods),
        nodes,
        tuple(each for each in operator.reports if each[0] in known),
        operator.since,
        world.time,
        prewarms=world.prewarms,
    )


@lru_cache(maxsize=50_000)
def assignment(job: Keyed, sequence: int) -> Keyed:
    """What the control API answers the agent of a pod."""
    value: Assignment = assignment_for(replace(JOB, status=job.value), f"u{sequence}")
    assigned, drain = value.generation, value.drain
    key = (
        value.action.value,
        assigned and (assigned.number, assigned.node_rank, assigned.num_nodes),
        drain and (drain.deadline, drain.is_preemption),
        value.show_stacks,
    )
    return Keyed(key, value)


def is_finished(job: Keyed) -> bool:
    return job.value.phase in FINISHED_PHASES


def act(world: World) -> World:
    """Carry out the actions of the newest pass."""
    for action in world.operator.pending:
        match action:
            case ("create", sequence):
                if world.pod(sequence) is None:
                    world = world._replace(pods=(*world.pods, Pod(sequence, world.time)))
            case ("delete", sequence, grace):
                world = _delete(world, sequence, grace)
            case ("annotate", sequence, protected):
                if (pod := world.pod(sequence)) is not None:
                    world = world.with_pod(pod._replace(protected=protected))
    return world._replace(operator=world.operator._replace(pending=()))


def _delete(world: World, sequence: int, grace: int | None) -> World:
    pod = world.pod(sequence)
    if pod is None:
        return world
    if grace == 0 or pod.node is None or pod.ended is not None:
        return without_pod(world, pod)
    if pod.deleted_by is None:
        return world.with_pod(pod._replace(deleted_by=world.time + GRACE_SECONDS))
    return world


def without_pod(world: World, pod: Pod) -> World:
    """Remove the pod's object.

    What still runs on a machine that was cut off runs on.
    """
    operator = world.operator
    return world._replace(
        pods=tuple(p for p in world.pods if p.sequence != pod.sequence),
        operator=operator._replace(reports=tuple(r for r in operator.reports if r[0] != pod.sequence)),
    )


def crashed(operator: Operator, time: int) -> Operator:
    return Operator(up=False, since=time)
