"""Truth table of the agent's state machine."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta

import pytest
from hypothesis import given
from hypothesis import strategies as st

from spottrain_agent.agent_state import (
    AgentState,
    AssignmentReceived,
    CancelDrain,
    Command,
    DrainSeen,
    Event,
    GenerationEnded,
    KillGeneration,
    Leave,
    NoticesChanged,
    ProcessesGone,
    RanksStarted,
    RequestDrain,
    SigtermReceived,
    StartGeneration,
    transition,
)
from spottrain_api.contract.assignments import AgentPhase, Assignment, AssignmentAction, GenerationAssignment
from spottrain_api.contract.configuration import DrainRequest
from spottrain_api.contract.notices import Notice, NoticeKind
from spottrain_api.contract.reports import Failure, FailureReason
from spottrain_api.settings.entrypoint import Entrypoint

NOW = datetime(2026, 1, 1, tzinfo=UTC)
FAILURE = Failure(reason=FailureReason.SCRIPT_ERROR, message="ValueError: no")


def generation(number: int) -> GenerationAssignment:
    return GenerationAssignment(
        number=number,
        rendezvous_id=f"g{number}",
        rendezvous_endpoint="127.0.0.1:1",
        node_rank=0,
        num_nodes=1,
        entrypoint=Entrypoint(script="train.py"),
        trainer={"job": "j", "generation": number, "attemptId": f"g{number}", "batch": {"global": 1}},
    )


def drain_by(seconds: float, reason: str = "Preempted") -> DrainRequest:
    deadline = NOW + timedelta(seconds=seconds)
    return DrainRequest(reason=reason, deadline=deadline, requested_at=NOW, is_preemption=True)


def assign(action: AssignmentAction, number: int | None = None, drain: DrainRequest | None = None) -> Event:
    named = generation(number) if number else None
    return AssignmentReceived(assignment=Assignment(action=action, generation=named, drain=drain))


def run(number: int) -> Event:
    return assign(AssignmentAction.RUN, number)


def stop(number: int) -> Event:
    return assign(AssignmentAction.STOP, number)


def stop_hung(number: int) -> Event:
    stopped = Assignment(action=AssignmentAction.STOP, generation=generation(number), show_stacks=True)
    return AssignmentReceived(assignment=stopped)


def drain(number: int, seconds: float = 30) -> Event:
    return assign(AssignmentAction.DRAIN, number, drain_by(seconds))


def ended(number: int, phase: AgentPhase) -> Event:
    return GenerationEnded(generation=number, phase=phase, failure=FAILURE if phase is AgentPhase.FAILED else None)


def notice(kind: NoticeKind = NoticeKind.PREEMPT, seconds: float = 30, cancelled: bool = False) -> Notice:
    return Notice(
        id="1",
        node="n",
        kind=kind,
        source="ec2",
        deadline=NOW + timedelta(seconds=seconds),
        observed_at=NOW,
        cancelled=cancelled,
    )


def noticed(*notices: Notice) -> Event:
    return NoticesChanged(notices=notices, now=NOW)


SIGTERM = SigtermReceived(notice=notice(NoticeKind.EVICT).model_copy(update={"source": "sigterm"}))
WAIT = assign(AssignmentAction.WAIT)
EXIT = assign(AssignmentAction.EXIT)
START1 = StartGeneration(assignment=generation(1))
START2 = StartGeneration(assignment=generation(2))
KILL1 = KillGeneration(generation=1)
LEAVE = Leave()
P = AgentPhase


def after(*events: Event, state: AgentState | None = None) -> tuple[AgentState, list[Command]]:
    """The state after the events, and the commands of the last one."""
    state = state or AgentState()
    commands: list[Command] = []
    for event in events:
        step = transition(state, event)
        state, commands = step.state, list(step.commands)
    return state, commands


CASES = {
    "run starts": ((run(1),), P.STARTING, [START1]),
    "run again is nothing new": ((run(1), run(1)), P.STARTING, []),
    "ranks started": ((run(1), RanksStarted(generation=1)), P.RUNNING, []),
    "ranks of another generation started": ((run(2), RanksStarted(generation=1)), P.STARTING, []),
    "wait does not stop": ((run(1), WAIT), P.STARTING, []),
    "stop kills": ((run(1), stop(1)), P.STOPPED, [KILL1]),
    "stop because of a hang shows the stacks": (
        (run(1), stop_hung(1)),
        P.STOPPED,
        [KillGeneration(generation=1, show_stacks=True)],
    ),
    "late stop of an older generation": ((run(2), stop(1)), P.STARTING, []),
    "stop of a generation never run": ((stop(3),), P.STOPPED, []),
    "late run of an older generation": ((run(2), run(1)), P.STARTING, []),
    "run of the next kills first": ((run(1), run(2)), P.STOPPED, [KILL1]),
    "run of the next starts when all are gone": (
        (run(1), run(2), ProcessesGone(generation=1)),
        P.STARTING,
        [START2],
    ),
    "run of the next after an end still kills what lingers": (
        (run(1), ended(1, P.DRAINED), run(2)),
        P.DRAINED,
        [KILL1],
    ),
    "run after everything has gone": (
        (run(1), ended(1, P.DRAINED), ProcessesGone(generation=1), run(2)),
        P.STARTING,
        [START2],
    ),
    "failure kills the rest": ((run(1), ended(1, P.FAILED)), P.FAILED, [KILL1]),
    "drained lets the launcher linger": ((run(1), ended(1, P.DRAINED)), P.DRAINED, []),
    "end is reported once": ((run(1), ended(1, P.DRAINED), ended(1, P.FAILED)), P.DRAINED, []),
    "end of another generation": ((run(2), ended(1, P.FAILED)), P.STARTING, []),
    "processes vanish": ((run(1), ProcessesGone(generation=1)), P.FAILED, []),
    "drain": ((run(1), drain(1)), P.STARTING, [RequestDrain(generation=1, request=drain_by(30))]),
    "later deadline changes nothing": ((run(1), drain(1, 30), drain(1, 60)), P.STARTING, []),
    "earlier deadline wins": (
        (run(1), drain(1, 30), drain(1, 10)),
        P.STARTING,
        [RequestDrain(generation=1, request=drain_by(10))],
    ),
    "drain of an older generation": ((run(2), drain(1)), P.STARTING, []),
    "drain of a generation never run": ((drain(2),), P.STOPPED, []),
    "drain of what has ended": ((run(1), ended(1, P.SUCCEEDED), drain(1)), P.SUCCEEDED, []),
    "notice drains without the operator": (
        (run(1), noticed(notice())),
        P.STARTING,
        [RequestDrain(generation=1, request=drain_by(30, "ec2: preempt"))],
    ),
    "recommendation does not drain": ((run(1), noticed(notice(NoticeKind.REBALANCE))), P.STARTING, []),
    "notice when idle": ((noticed(notice()),), P.IDLE, []),
    "run that crosses a notice drains at once": (
        (noticed(notice()), run(1)),
        P.STARTING,
        [START1, RequestDrain(generation=1, request=drain_by(30, "ec2: preempt"))],
    ),
    "cancelled notice takes the drain back": (
        (run(1), noticed(notice()), noticed(notice(cancelled=True))),
        P.STARTING,
        [CancelDrain(generation=1)],
    ),
    "vanished notice takes the drain back": (
        (run(1), noticed(notice()), noticed()),
        P.STARTING,
        [CancelDrain(generation=1)],
    ),
    "cancelled too late": (
        (run(1), noticed(notice()), DrainSeen(generation=1), noticed()),
        P.STARTING,
        [],
    ),
    "cancelled notice leaves the operator's drain": (
        (run(1), drain(1), noticed(notice()), noticed()),
        P.STARTING,
        [],
    ),
    "operator's drain after a notice stays when the notice goes": (
        (run(1), noticed(notice()), drain(1, 60), noticed()),
        P.STARTING,
        [],
    ),
    "exit when idle": ((EXIT,), P.IDLE, [LEAVE]),
    "exit while running": ((run(1), EXIT), P.STOPPED, [KILL1]),
    "exit leaves when all are gone": ((run(1), EXIT, ProcessesGone(generation=1)), P.STOPPED, [LEAVE]),
    "sigterm when idle": ((SIGTERM,), P.IDLE, [LEAVE]),
    "sigterm drains": (
        (run(1), SIGTERM),
        P.STARTING,
        [RequestDrain(generation=1, request=drain_by(30, "sigterm: evict"))],
    ),
    "sigterm twice": ((run(1), SIGTERM, SIGTERM), P.STARTING, []),
    "sigterm leaves after the drain": (
        (run(1), SIGTERM, ended(1, P.DRAINED), ProcessesGone(generation=1)),
        P.DRAINED,
        [LEAVE],
    ),
    "no run after sigterm": ((run(1), SIGTERM, run(2)), P.STARTING, []),
    "stop of a pending generation": (
        (run(1), run(2), stop(2), ProcessesGone(generation=1)),
        P.STOPPED,
        [],
    ),
}


@pytest.mark.parametrize(("events", "phase", "commands"), CASES.values(), ids=CASES)
def test_transition(events: tuple[Event, ...], phase: AgentPhase, commands: list[Command]) -> None:
    state, last = after(*events)
    assert (state.phase, last) == (phase, commands)


def test_stop_of_a_pending_generation_is_reported_as_that_generation() -> None:
    state, _ = after(run(1), run(2), stop(2), ProcessesGone(generation=1))
    assert state.generation == 2


def test_a_notice_stays_in_the_reports_until_it_is_gone() -> None:
    assert after(noticed(notice()))[0].all_notices == (notice(),)
    assert after(noticed(notice()), noticed())[0].all_notices == ()


numbers = st.integers(1, 4)
events = st.one_of(
    numbers.map(run),
    numbers.map(stop),
    st.builds(drain, numbers, st.integers(1, 60)),
    st.builds(ended, numbers, st.sampled_from([P.DRAINED, P.SUCCEEDED, P.FAILED])),
    st.builds(ProcessesGone, generation=numbers),
    st.builds(RanksStarted, generation=numbers),
    st.sampled_from([WAIT, EXIT, SIGTERM, noticed(), noticed(notice())]),
)


@given(st.lists(events, max_size=25))
def test_never_two_generations_and_never_backwards(history: list[Event]) -> None:
    state = AgentState()
    started: list[int] = []
    for event in history:
        before = state
        step = transition(state, event)
        state = step.state
        for command in step.commands:
            if isinstance(command, StartGeneration):
                is_gone = isinstance(event, ProcessesGone) and event.generation == before.generation
                assert not before.has_processes or is_gone
                assert not before.leaving
                started.append(command.assignment.number)
        assert state.generation >= before.generation
    assert started == sorted(set(started))
