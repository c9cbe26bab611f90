"""What the agent does next: a pure state machine. (state, event) -> (state, commands); no clock, no I/O.

Rules:
- At most one generation has processes. The next one starts when all processes of the last one are gone.
- An assignment for a different generation than the current one changes nothing, because it is late. The exception is
  a RUN of a higher number, which replaces the current generation.
- WAIT never stops a running generation: an operator that has just started may not know it yet.
- If several sources ask for a drain, the earliest deadline wins.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from datetime import datetime

from spottrain_api.contract.assignments import AgentPhase, Assignment, AssignmentAction, GenerationAssignment
from spottrain_api.contract.configuration import DrainRequest
from spottrain_api.contract.notices import Notice, NoticeKind
from spottrain_api.contract.reports import CommitRef, Failure, FailureReason

ACTIVE_PHASES = frozenset({AgentPhase.STARTING, AgentPhase.RUNNING})
SIGTERM_SOURCE = "sigterm"


@dataclass(frozen=True, slots=True, kw_only=True)
class AgentState:
    """What the agent knows about itself.

    Attributes:
        generation: The newest generation that was run or is running; 0 for none.
        phase: What became of it.
        has_processes: Some of its processes may be alive, even after its end.
        pending: The next generation, which waits until they are gone.
        abandoned: The newest generation that was over before it ran here.
        drain: The drain request in force.
        drain_is_local: Only a notice asked for the drain. If the notice is cancelled, so is the drain, unless
            `drain_seen`.
        drain_seen: The ranks act on the drain.
        leaving: No generation starts any more.
        notices: The watcher's notices.
        sigterm: The notice that stands for a SIGTERM.
        commit: The newest commit of the generation.
        failure: Why the generation failed.
    """

    generation: int = 0
    phase: AgentPhase = AgentPhase.IDLE
    has_processes: bool = False
    pending: GenerationAssignment | None = None
    abandoned: int = 0
    drain: DrainRequest | None = None
    drain_is_local: bool = False
    drain_seen: bool = False
    leaving: bool = False
    notices: tuple[Notice, ...] = ()
    sigterm: Notice | None = None
    commit: CommitRef | None = None
    failure: Failure | None = None

    @property
    def is_active(self) -> bool:
        return self.phase in ACTIVE_PHASES

    @property
    def is_at_risk(self) -> bool:
        """Whether the node may be taken back soon, by a recommendation in force."""
        return any(notice.kind is NoticeKind.REBALANCE and not notice.cancelled for notice in self.notices)

    @property
    def all_notices(self) -> tuple[Notice, ...]:
        return (*self.notices, self.sigterm) if self.sigterm else self.notices


# --- events ----------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class AssignmentReceived:
    assignment: Assignment


@dataclass(frozen=True, slots=True, kw_only=True)
class NoticesChanged:
    """The watcher's current notices."""

    notices: tuple[Notice, ...]
    now: datetime


@dataclass(frozen=True, slots=True, kw_only=True)
class SigtermReceived:
    """The pod is being deleted. SIGKILL comes at the notice's deadline."""

    notice: Notice


@dataclass(frozen=True, slots=True, kw_only=True)
class RanksStarted:
    generation: int


@dataclass(frozen=True, slots=True, kw_only=True)
class DrainSeen:
    """The ranks act on the drain request, so that it can't be taken back any more."""

    generation: int


@dataclass(frozen=True, slots=True, kw_only=True)
class GenerationEnded:
    """It is known how the generation ended on this member. Some of its processes may still be there."""

    generation: int
    phase: AgentPhase
    commit: CommitRef | None = None
    failure: Failure | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class ProcessesGone:
    generation: int


Event = (
    AssignmentReceived | NoticesChanged | SigtermReceived | RanksStarted | DrainSeen | GenerationEnded | ProcessesGone
)

# --- commands --------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class StartGeneration:
    assignment: GenerationAssignment


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestDrain:
    generation: int
    request: DrainRequest


@dataclass(frozen=True, slots=True, kw_only=True)
class CancelDrain:
    generation: int


@dataclass(frozen=True, slots=True, kw_only=True)
class KillGeneration:
    """Send SIGKILL to all its processes, including workers and their children.

    Attributes:
        show_stacks: First log where the ranks stand.
    """

    generation: int
    show_stacks: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Leave:
    """Report once more and exit."""


Command = StartGeneration | RequestDrain | CancelDrain | KillGeneration | Leave


@dataclass(frozen=True, slots=True, kw_only=True)
class Reaction:
    """What an event leads to: the next state, and what to do now."""

    state: AgentState
    commands: tuple[Command, ...] = field(default=())


def transition(state: AgentState, event: Event) -> Reaction:
    """Return the next state, and the commands to carry out now. Pure."""
    match event:
        case AssignmentReceived(assignment=assignment):
            return _assigned(state, assignment)
        case NoticesChanged(notices=notices, now=now):
            return _noticed(replace(state, notices=notices), now)
        case SigtermReceived(notice=notice):
            return _terminated(state, notice)
        case ProcessesGone(generation=number):
            return _processes_gone(state) if number == state.generation else Reaction(state=state)
        case GenerationEnded():
            return _ended(state, event)
        case RanksStarted(generation=number):
            is_news = number == state.generation and state.phase is AgentPhase.STARTING
            return Reaction(state=replace(state, phase=AgentPhase.RUNNING) if is_news else state)
        case DrainSeen(generation=number):
            is_news = number == state.generation and state.drain is not None
            return Reaction(state=replace(state, drain_seen=True) if is_news else state)


# --- assignments -----------------------------------------------------------------------------------------


def _assigned(state: AgentState, assignment: Assignment) -> Reaction:
    if assignment.action is AssignmentAction.EXIT:
        return _exit(state)
    if assignment.generation is None:
        return Reaction(state=state)
    match assignment.action:
        case AssignmentAction.RUN:
            return _run(state, assignment.generation)
        case AssignmentAction.DRAIN if assignment.drain is not None:
            return _drain(state, assignment.generation.number, assignment.drain)
        case AssignmentAction.STOP:
            return _stop(state, assignment.generation.number, show_stacks=bool(assignment.show_stacks))
        case _:
            return Reaction(state=state)


def _run(state: AgentState, generation: GenerationAssignment) -> Reaction:
    newest = state.pending.number if state.pending else state.generation
    if state.leaving or generation.number <= newest:
        return Reaction(state=state)
    if state.has_processes:
        commands = (KillGeneration(generation=state.generation),)
        return Reaction(state=_stopped(replace(state, pending=generation)), commands=commands)
    return _start(state, generation)


def _start(state: AgentState, generation: GenerationAssignment) -> Reaction:
    started = replace(
        state,
        generation=generation.number,
        phase=AgentPhase.STARTING,
        has_processes=True,
        pending=None,
        drain=None,
        drain_is_local=False,
        drain_seen=False,
        commit=None,
        failure=None,
    )
    start = StartGeneration(assignment=generation)
    # The operator didn't know about this notice, or it would not have chosen this pod: drain as soon as possible.
    request = _drain_for(started.all_notices)
    if request is None:
        return Reaction(state=started, commands=(start,))
    drained = _request_drain(started, request, is_local=True)
    return Reaction(state=drained.state, commands=(start, *drained.commands))


def _drain(state: AgentState, number: int, request: DrainRequest) -> Reaction:
    if number == state.generation and state.is_active:
        return _request_drain(state, request, is_local=False)
    return _never_run(state, number)


def _stop(state: AgentState, number: int, *, show_stacks: bool) -> Reaction:
    if number != state.generation:
        return _never_run(state, number)
    if not state.has_processes:
        return Reaction(state=state)
    kill = KillGeneration(generation=number, show_stacks=show_stacks and state.is_active)
    return Reaction(state=_stopped(state), commands=(kill,))


def _never_run(state: AgentState, number: int) -> Reaction:
    """A generation is over before this agent has started it. Only this agent can report that."""
    if number <= state.generation:
        return Reaction(state=state)
    pending = state.pending if state.pending and state.pending.number > number else None
    abandoned = replace(state, pending=pending, abandoned=number)
    if state.has_processes:
        return Reaction(state=_stopped(abandoned), commands=(KillGeneration(generation=state.generation),))
    return Reaction(state=_abandon(abandoned))


def _abandon(state: AgentState) -> AgentState:
    return replace(state, generation=state.abandoned, phase=AgentPhase.STOPPED, drain=None, commit=None, failure=None)


def _exit(state: AgentState) -> Reaction:
    leaving = replace(state, leaving=True, pending=None)
    if not state.has_processes:
        return Reaction(state=leaving, commands=(Leave(),))
    return Reaction(state=_stopped(leaving), commands=(KillGeneration(generation=state.generation),))


def _stopped(state: AgentState) -> AgentState:
    return replace(state, phase=AgentPhase.STOPPED) if state.is_active else state


# --- drains ----------------------------------------------------------------------------------------------


def _request_drain(state: AgentState, request: DrainRequest, *, is_local: bool) -> Reaction:
    if state.drain is not None and state.drain.deadline <= request.deadline:
        return Reaction(state=replace(state, drain_is_local=state.drain_is_local and is_local))
    is_local = is_local and (state.drain is None or state.drain_is_local)
    drained = replace(state, drain=request, drain_is_local=is_local)
    return Reaction(state=drained, commands=(RequestDrain(generation=state.generation, request=request),))


def _drain_for(notices: tuple[Notice, ...]) -> DrainRequest | None:
    urgent = [notice for notice in notices if notice.makes_drain]
    if not urgent:
        return None
    first = min(urgent, key=lambda notice: notice.deadline)
    reason = f"{first.source}: {first.kind}"
    return DrainRequest(reason=reason, deadline=first.deadline, requested_at=first.observed_at, is_preemption=True)


def _noticed(state: AgentState, now: datetime) -> Reaction:
    if not state.is_active:
        return Reaction(state=state)
    request = _drain_for(state.all_notices)
    if request is not None:
        return _request_drain(state, request.model_copy(update={"requested_at": now}), is_local=True)
    if state.drain is not None and state.drain_is_local and not state.drain_seen:
        undone = replace(state, drain=None, drain_is_local=False)
        return Reaction(state=undone, commands=(CancelDrain(generation=state.generation),))
    return Reaction(state=state)


def _terminated(state: AgentState, notice: Notice) -> Reaction:
    if state.sigterm is not None:
        return Reaction(state=state)
    leaving = replace(state, sigterm=notice, leaving=True, pending=None)
    if not state.has_processes:
        return Reaction(state=leaving, commands=(Leave(),))
    return _noticed(leaving, notice.observed_at)


# --- ends ------------------------------------------------------------------------------------------------


def _ended(state: AgentState, event: GenerationEnded) -> Reaction:
    if event.generation != state.generation or not state.is_active:
        return Reaction(state=state)
    ended = replace(state, phase=event.phase, commit=event.commit, failure=event.failure)
    if event.phase is AgentPhase.FAILED:
        return Reaction(state=ended, commands=(KillGeneration(generation=state.generation),))
    return Reaction(state=ended)


def _processes_gone(state: AgentState) -> Reaction:
    gone = replace(state, has_processes=False)
    if gone.is_active:
        failure = Failure(
            reason=FailureReason.KILLED, message="All processes of the generation disappeared without a trace."
        )
        gone = replace(gone, phase=AgentPhase.FAILED, failure=failure)
    if gone.leaving:
        return Reaction(state=gone, commands=(Leave(),))
    if gone.abandoned > gone.generation:
        gone = _abandon(gone)
    if gone.pending is not None:
        return _start(gone, gone.pending)
    return Reaction(state=gone)
