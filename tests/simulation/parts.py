"""What the small world is made of, and the job that it runs."""

from __future__ import annotations

from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta

from spottrain_api.contract.assignments import AgentPhase, Assignment, CapacityType
from spottrain_api.contract.names import TAINT_PREEMPTION
from spottrain_api.contract.notices import Notice
from spottrain_api.contract.reports import CommitRef, Failure, Progress, TrainerPhase
from spottrain_api.v1alpha1.spec import TrainingJobSpec
from spottrain_operator.core.model import NodeView, PodView

EPOCH = datetime(2026, 1, 1, tzinfo=UTC)
NOT_READY_AFTER = 40.0
STEP_SECONDS = 0.5
START_SECONDS = 3.0
# Of each step.
WAIT_SECONDS = 0.125
STALL_SECONDS = 0.0625


def at(seconds: float) -> datetime:
    """The world's time as a date."""
    return EPOCH + timedelta(seconds=seconds)


def spec_of(**changes: object) -> TrainingJobSpec:
    """A small job on up to six nodes, two of them on-demand."""
    fields: dict[str, object] = {
        "image": "train:1",
        "entrypoint": {"script": "train.py"},
        "nodes": {"min": 1, "max": 6},
        "capacity": {"onDemand": {"min": 2, "pricePerHour": 3.0}, "spot": {"pricePerHour": 1.0}},
        "batch": {"global": 64},
        "checkpoint": {"uri": "s3://bucket/job"},
    }
    return TrainingJobSpec.model_validate(fields | changes)


@dataclass
class Node:
    name: str
    capacity_type: CapacityType
    pool: str | None = None
    alive: bool = True
    died_at: float | None = None
    hint: Notice | None = None  # the cloud recommends to leave the node
    notice: Notice | None = None
    notice_seen_at: float = 0.0  # when the node object shows it
    kill_at: float | None = None

    @property
    def announced(self) -> bool:
        """The node's watcher has a notice to tell; a machine that came up again has none."""
        return self.notice is not None and not self.notice.cancelled and self.kill_at is not None

    def view(self, time: float, *, taints: bool) -> NodeView:
        """The node object. `taints`: a node that is about to go is closed to new pods."""
        shown = self.notice if time >= self.notice_seen_at else None
        ready = self.died_at is None or time < self.died_at + NOT_READY_AFTER
        tainted = taints and shown is not None and not shown.cancelled
        taint = (TAINT_PREEMPTION,) if tainted else ()
        return NodeView(name=self.name, ready=ready, notice=shown or self.hint, taints=taint)


@dataclass
class Ranks:
    """What an agent runs: its share of one generation."""

    generation: int
    phase: AgentPhase = AgentPhase.STARTING
    drain: bool = False
    drain_seen: datetime | None = None
    failure: Failure | None = None
    commit: CommitRef | None = None


@dataclass
class Pod:
    view_name: str
    uid: str
    sequence: int
    capacity_type: CapacityType
    template_hash: str
    created: float
    pool: str | None = None
    pool_hash: str | None = None
    node: str | None = None
    scheduled: float | None = None
    unschedulable_since: float | None = None
    delete_at: float | None = None
    agent_since: float | None = None  # when its agent came up
    dead: bool = False
    failed: bool = False
    ranks: Ranks | None = None
    assignment: Assignment | None = None
    next_poll: float = 0.0
    next_report: float = 0.0
    protection: dict[str, str] = field(default_factory=dict)

    def view(self, time: float) -> PodView:
        up = self.agent_since is not None and time >= self.agent_since
        return PodView(
            name=self.view_name,
            uid=self.uid,
            sequence=self.sequence,
            capacity_type=self.capacity_type,
            template_hash=self.template_hash,
            created_at=at(self.created),
            phase="Failed" if self.failed else "Running" if up else "Pending",
            ready=up and not self.failed,
            exit_code=137 if self.failed else None,
            ready_since=at(self.agent_since) if self.agent_since is not None and up else None,
            node=self.node,
            scheduled_at=at(self.scheduled) if self.scheduled is not None else None,
            ip=f"127.0.1.{self.sequence % 250}" if up else None,
            deleting=self.delete_at is not None,
            deletion_deadline=at(self.delete_at) if self.delete_at is not None else None,
            unschedulable_since=at(self.unschedulable_since) if self.unschedulable_since is not None else None,
            container_started=up,
            pool=self.pool,
            pool_hash=self.pool_hash,
            protection=self.protection,
        )


@dataclass
class Training:
    """The state that the ranks of one generation share."""

    world: int
    started: float | None = None  # when all had joined
    step: int = 0
    start_step: int = 0
    first_step_at: datetime | None = None
    last_step_at: datetime | None = None
    next_step: float = 0.0
    draining_until: float | None = None

    @property
    def num_later_steps(self) -> int:
        """Steps after the first."""
        return max(0, self.step - self.start_step - 1)

    def step_age(self, time: float) -> float:
        """Seconds since the last step, or since the ranks joined."""
        if self.last_step_at is None:
            return 0.0 if self.started is None else time - self.started
        return (at(time) - self.last_step_at).total_seconds()

    def progress(self, ranks: Ranks | None, time: float, total_steps: int) -> Progress | None:
        """What these ranks, which are of this generation, have told their agent."""
        if ranks is None or self.started is None:
            return None
        trains = time >= self.started + START_SECONDS
        return Progress(
            generation=ranks.generation,
            phase=TrainerPhase.TRAINING if trains else TrainerPhase.STARTING,
            step=self.step if trains else 0,
            start_step=self.start_step,
            total_steps=total_steps,
            step_seconds=STEP_SECONDS,
            waited_seconds=WAIT_SECONDS * self.num_later_steps,
            stalled_seconds=STALL_SECONDS * self.num_later_steps,
            first_step_at=self.first_step_at,
            last_step_at=self.last_step_at,
            drain_seen_at=ranks.drain_seen,
            updated_at=at(time),
            commit=ranks.commit,
        )
