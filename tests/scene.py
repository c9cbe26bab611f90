"""A scene: one observation of a job, for truth tables of `plan`.

Its methods change one thing each.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from datetime import UTC, datetime, timedelta
from typing import Any

from spottrain_api.contract.assignments import AgentPhase, AgentReport, CapacityType
from spottrain_api.contract.notices import Notice
from spottrain_api.contract.reports import CommitRef, Failure, FailureReason, Progress, TrainerPhase
from spottrain_api.v1alpha1.status import GenerationState, TrainingJobStatus
from spottrain_operator.core.model import (
    AnnotatePod,
    JobView,
    NodeView,
    Observed,
    Plan,
    PodView,
    ReportView,
)
from spottrain_operator.core.plan import plan
from spottrain_operator.core.timing import DEFAULT_TIMING
from world.jobs import spec_of

START = datetime(2026, 1, 1, tzinfo=UTC)
NOW = START + timedelta(seconds=100)
ACTIVE, DRAINING, STOPPING, ENDED = GenerationState


def at(seconds: float) -> datetime:
    return START + timedelta(seconds=seconds)


def pod(sequence: int, **changes: Any) -> PodView:
    """A pod that is up; the first two are on-demand."""
    fields: dict[str, Any] = {
        "name": f"job-{sequence}",
        "uid": f"u{sequence}",
        "sequence": sequence,
        "capacity_type": CapacityType.ON_DEMAND if sequence <= 2 else CapacityType.SPOT,
        "template_hash": "t1",
        "created_at": START,
        "phase": "Running",
        "ready": True,
        "ready_since": at(2),
        "node": f"n{sequence}",
        "scheduled_at": START,
        "ip": f"10.0.0.{sequence}",
        "container_started": True,
        "grace_seconds": 120.0,
    }
    return PodView(**(fields | changes))


def report(sequence: int, generation: int, phase: AgentPhase, **changes: Any) -> AgentReport:
    fields: dict[str, Any] = {
        "pod": f"job-{sequence}",
        "pod_uid": f"u{sequence}",
        "generation": generation,
        "phase": phase,
        "warm": True,
        "rendezvous_port": 29000 + sequence,
        "sent_at": NOW,
    }
    return AgentReport(**(fields | changes))


def commit(generation: int, step: int) -> CommitRef:
    return CommitRef(generation=generation, step=step, manifest=f"m{generation}-{step}", committed_at=NOW)


def training(step: int = 50) -> Progress:
    return Progress(
        generation=1,
        phase=TrainerPhase.TRAINING,
        step=step,
        total_steps=1000,
        step_seconds=1.0,
        first_step_at=at(10),
        last_step_at=at(99),
        updated_at=NOW,
    )


def notice(sequence: int, lead: float = 30.0, **changes: Any) -> Notice:
    fields: dict[str, Any] = {
        "id": f"notice-{sequence}",
        "node": f"n{sequence}",
        "source": "ec2",
        "deadline": NOW + timedelta(seconds=lead),
        "observed_at": NOW,
    }
    return Notice(**(fields | changes))


@dataclass(frozen=True)
class Scene:
    """One observation; its methods change one thing each."""

    observed: Observed
    now: datetime = NOW

    def plan(self) -> Plan:
        return plan(self.observed, self.now)

    def decided(self) -> Scene:
        """The scene after the plan's status was written and pods were annotated.

        Nothing else has happened.
        """
        decided = self.plan()
        scene = replace(self, observed=replace(self.observed, held_before=decided.held))
        scene = scene.job(status=decided.status)
        for action in decided.actions:
            if isinstance(action, AnnotatePod):
                scene = scene.annotated(action)
        return scene

    def annotated(self, action: AnnotatePod) -> Scene:
        [pod] = [each for each in self.observed.pods if each.uid == action.uid]
        merged = {**pod.protection, **action.annotations}
        return self.pod(pod.sequence, protection={name: each for name, each in merged.items() if each is not None})

    def job(self, **changes: Any) -> Scene:
        return replace(self, observed=replace(self.observed, job=replace(self.observed.job, **changes)))

    def spec(self, **changes: Any) -> Scene:
        return self.job(spec=spec_of(**changes))

    def status(self, **changes: Any) -> Scene:
        return self.job(status=self.observed.job.status.model_copy(update=changes))

    def generation(self, **changes: Any) -> Scene:
        generation = self.observed.job.status.generation
        assert generation is not None
        return self.status(generation=generation.model_copy(update=changes))

    def pod(self, sequence: int, **changes: Any) -> Scene:
        pods = tuple(replace(p, **changes) if p.sequence == sequence else p for p in self.observed.pods)
        return replace(self, observed=replace(self.observed, pods=pods))

    def with_pod(self, new: PodView) -> Scene:
        nodes = dict(self.observed.nodes)
        if new.node is not None:
            nodes[new.node] = NodeView(name=new.node)
        return replace(self, observed=replace(self.observed, pods=(*self.observed.pods, new), nodes=nodes))

    def without_pod(self, sequence: int) -> Scene:
        pods = tuple(p for p in self.observed.pods if p.sequence != sequence)
        return replace(self, observed=replace(self.observed, pods=pods))

    def loses_relay(self, sequence: int, *, comes_by: datetime) -> Scene:
        """An agent that has reported may be on its way to the operator until then."""
        reports, uid = self.observed.reports, f"u{sequence}"
        lost = replace(reports[uid], comes_by=comes_by)
        return replace(self, observed=replace(self.observed, reports={**reports, uid: lost}))

    def node(self, sequence: int, **changes: Any) -> Scene:
        node = replace(self.observed.nodes[f"n{sequence}"], **changes)
        return replace(self, observed=replace(self.observed, nodes={**self.observed.nodes, node.name: node}))

    def says(self, sequence: int, *, age: float = 0.0, latency: float = 0.0, **changes: Any) -> Scene:
        """The newest report of a pod's agent, changed in some fields.

        It came `age` seconds ago, and was on its way for `latency` seconds longer than others.
        """
        uid = f"u{sequence}"
        known = self.observed.reports.get(uid)
        base = known.report if known is not None else report(sequence, 0, AgentPhase.IDLE)
        received_at = self.now - timedelta(seconds=age)
        view = ReportView(report=base.model_copy(update=changes), received_at=received_at, latency=latency)
        return replace(self, observed=replace(self.observed, reports={**self.observed.reports, uid: view}))

    def all_say(self, **changes: Any) -> Scene:
        scene = self
        for each in self.observed.pods:
            scene = scene.says(each.sequence, **changes)
        return scene

    def in_steps_of(self, seconds: float | None, *, age: float, **changes: Any) -> Scene:
        """Ranks whose steps take so long, or nobody knows, and whose newest is so old."""
        progress = training().model_copy(update={"step_seconds": seconds})
        return self.all_say(progress=progress, step_age_seconds=age, **changes)

    def forgets(self, sequence: int) -> Scene:
        reports = {uid: view for uid, view in self.observed.reports.items() if uid != f"u{sequence}"}
        return replace(self, observed=replace(self.observed, reports=reports))

    def later(self, seconds: float) -> Scene:
        """Time passes; all agents go on reporting the same."""
        now = self.now + timedelta(seconds=seconds)
        reports = {uid: replace(view, received_at=now) for uid, view in self.observed.reports.items()}
        return replace(self, observed=replace(self.observed, reports=reports), now=now)


def waiting_job(num_pods: int = 4, **spec: Any) -> Scene:
    """A new job whose pods are up and warm; nothing was started yet."""
    pods = tuple(pod(sequence) for sequence in range(1, num_pods + 1))
    job = JobView(
        namespace="default",
        name="job",
        uid="0123456789ab",
        spec=spec_of(**({"nodes": {"min": 2, "max": 4}} | spec)),
        metadata_generation=1,
        created_at=START,
        status=TrainingJobStatus(last_sequence=num_pods),
    )
    observed = Observed(
        job=job,
        pods=pods,
        nodes={f"n{p.sequence}": NodeView(name=f"n{p.sequence}") for p in pods},
        template_hash="t1",
        listening_since=START,
        timing=replace(DEFAULT_TIMING, record_interval=2.0),  # most scenes are seconds long
    )
    return Scene(observed).all_say(phase=AgentPhase.IDLE)


def starting_job(**spec: Any) -> Scene:
    """Generation 1 was started 100 s ago and is about to make its first step."""
    scene = replace(waiting_job(**spec), now=at(3)).all_say(phase=AgentPhase.IDLE).decided()
    return replace(scene, now=at(4)).all_say(generation=1, phase=AgentPhase.STARTING, step_age_seconds=1.0)


def training_job(**spec: Any) -> Scene:
    """Generation 1 with four members has made 50 steps and committed 40."""
    scene = replace(starting_job(**spec), now=NOW)
    running = {"generation": 1, "phase": AgentPhase.RUNNING, "step_age_seconds": 1.0, "progress": training()}
    return scene.all_say(**running, commit=commit(1, 40)).decided()


Change = Callable[[Scene], Scene]


def failed(scene: Scene, reason: FailureReason, message: str = "it broke") -> Scene:
    failure = Failure(reason=reason, message=message)
    return scene.all_say(phase=AgentPhase.FAILED, failure=failure)
