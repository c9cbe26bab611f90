"""What the operator answers: the status of a TrainingJob."""

from __future__ import annotations

from datetime import datetime
from enum import StrEnum
from typing import Annotated

from pydantic import ConfigDict, Field

from ..contract import CommitRef, Member, MemoryCheckpoint, StrategyChoice
from .resource import Resource


class StatusResource(Resource):
    """Base of the status: unknown fields are kept out, so that an older operator can read a newer status."""

    model_config = ConfigDict(extra="ignore")


class Phase(StrEnum):
    """PENDING: waiting for nodes. STARTING: a generation starts. DRAINING: it commits and makes way for the
    next. RECOVERING: a generation broke and the next isn't there yet."""

    PENDING = "Pending"
    STARTING = "Starting"
    RUNNING = "Running"
    DRAINING = "Draining"
    RECOVERING = "Recovering"
    SUSPENDED = "Suspended"
    SUCCEEDED = "Succeeded"
    FAILED = "Failed"


FINISHED_PHASES = frozenset({Phase.SUCCEEDED, Phase.FAILED})


class Condition(StatusResource):
    """As metav1.Condition. Types: Ready, Progressing, Preempted, SpotAvailable, CheckpointsHealthy, Blocked,
    Suspended, Succeeded, Failed."""

    type: str
    status: str  # "True", "False", "Unknown"
    reason: str
    message: str
    last_transition_time: datetime


class GenerationState(StrEnum):
    """ACTIVE: assigned. DRAINING: asked to commit and stop. STOPPING: told to stop at once. ENDED: over."""

    ACTIVE = "Active"
    DRAINING = "Draining"
    STOPPING = "Stopping"
    ENDED = "Ended"


class GenerationStatus(StatusResource):
    """The newest generation. Written before anyone acts on it; assignments are made from it alone."""

    number: int
    state: GenerationState
    rendezvous_id: Annotated[str, Field(alias="rendezvousID")]
    rendezvous_endpoint: str
    world_size: int
    members: tuple[Member, ...] = ()
    resume: CommitRef | None = None
    memory: MemoryCheckpoint | None = None  # what it begins with instead, where members' memory holds a later step
    template_hash: str = ""
    started_at: datetime
    first_step_at: datetime | None = None
    # Why and until when, while DRAINING or STOPPING; why, once ENDED.
    reason: str | None = None
    requested_at: datetime | None = None
    deadline: datetime | None = None
    ended_at: datetime | None = None


class ProgressStatus(StatusResource):
    """How far the training is. `display` is for the printer column; `checkpoint_interval` says how often it is
    committed, and why so; `skipped_steps` are those that would have spoilt the model and left no trace in it;
    `message` is the ranks' newest word on what went other than planned."""

    step: int = 0
    total_steps: int | None = None
    display: str = ""
    loss: float | None = None
    tokens_per_second: float | None = None
    eta_seconds: float | None = None
    last_step_at: datetime | None = None
    checkpoint_interval: str | None = None
    skipped_steps: int = 0
    rollbacks: int = 0
    message: str | None = None


class Transition(StatusResource):
    """One change of membership: the end of a generation and the start of the next, as the user felt it.

    `steps_redone` and `seconds_without_step` are known (not None) once the next generation has made a step.
    """

    generation: int  # the one that ended
    reason: str  # "Preempted", "NodeLost", "Grow", "Failure", "Suspend", "Edited", "Hang", ...
    message: str = ""
    with_notice: bool = False
    from_memory: bool = False  # the next generation went on from a step in members' memory
    at: datetime
    last_step: int = 0
    last_step_at: datetime | None = None
    resume_step: int | None = None
    steps_redone: int | None = None
    seconds_without_step: float | None = None
    world_size_before: int = 0
    world_size_after: int | None = None


class Counts(StatusResource):
    """Pods of the newest generation and pods that wait, warm, for the next."""

    on_demand: int = 0
    spot: int = 0
    waiting: int = 0


class CostStatus(StatusResource):
    """Money so far, in the currency of the prices: what was spent, and what as many on-demand nodes would
    have cost for the same time."""

    total: float = 0.0
    on_demand_only: float = 0.0
    display: str = ""


class TrainingJobStatus(StatusResource):
    """What the operator knows and has decided. Everything it needs to go on after its own restart is here."""

    phase: Phase = Phase.PENDING
    message: str = ""
    observed_generation: int = 0
    conditions: tuple[Condition, ...] = ()
    generation: GenerationStatus | None = None
    progress: ProgressStatus = ProgressStatus()
    strategy: Annotated[StrategyChoice | None, Field(description="What strategy auto came to, and why.")] = None
    commit: CommitRef | None = None
    members: Counts = Counts()
    transitions: tuple[Transition, ...] = ()
    preemptions: int = 0
    preemptions_without_notice: int = 0
    steps_redone: int = 0
    failures: int = 0
    generations_without_progress: int = 0
    goodput: float | None = None
    goodput_display: str | None = None
    productive_seconds: float = 0.0
    cost: CostStatus | None = None
    # Bookkeeping that must survive the operator.
    last_sequence: int = 0
    spot_pending_since: datetime | None = None
    fallback_since: datetime | None = None
    accounted_at: datetime | None = None
    start_time: datetime | None = None
    completion_time: datetime | None = None

    def condition(self, kind: str) -> Condition | None:
        """The condition of this type, or None where it was never set."""
        return next((condition for condition in self.conditions if condition.type == kind), None)


PRINTER_COLUMNS: tuple[tuple[str, str, str, int], ...] = (
    # name, type, JSONPath, priority (0: always shown)
    ("Phase", "string", ".status.phase", 0),
    ("Step", "string", ".status.progress.display", 0),
    ("Loss", "number", ".status.progress.loss", 0),
    ("World", "integer", ".status.generation.worldSize", 0),
    ("On-Demand", "integer", ".status.members.onDemand", 0),
    ("Spot", "integer", ".status.members.spot", 0),
    ("Gen", "integer", ".status.generation.number", 0),
    ("Preempted", "integer", ".status.preemptions", 0),
    ("Redone", "integer", ".status.stepsRedone", 0),
    ("Goodput", "string", ".status.goodputDisplay", 0),
    ("Cost", "string", ".status.cost.display", 0),
    ("Age", "date", ".metadata.creationTimestamp", 0),
    ("Committed", "integer", ".status.commit.step", 1),
    ("Tokens/s", "number", ".status.progress.tokensPerSecond", 1),
    ("Message", "string", ".status.message", 1),
)
