"""The agent of one pod: the real state machine, over ranks that are played."""

from __future__ import annotations

from datetime import datetime
from typing import assert_never

from spottrain_agent.agent_state import (
    AgentState,
    AssignmentReceived,
    CancelDrain,
    Command,
    Event,
    KillGeneration,
    Leave,
    NoticesChanged,
    RequestDrain,
    SigtermReceived,
    StartGeneration,
    transition,
)
from spottrain_api.contract.assignments import AgentPhase, AgentReport, Assignment, GenerationAssignment
from spottrain_api.contract.notices import Notice
from spottrain_api.contract.reports import Progress
from spottrain_simulator.notices import sigterm
from spottrain_simulator.ranks import Ranks, Training


class Agent:
    """The agent of one pod.

    Attributes:
        state: What it knows about itself.
        training: The training of its job.
        assigned: The newest generation that it has started.
        ranks: The ranks of that generation, on all members.
        has_news: It reports as soon as it can.
        has_left: It has exited.
    """

    def __init__(self, pod: str, uid: str, node: str, training: Training) -> None:
        self.pod, self.uid, self.node = pod, uid, node
        self.training = training
        self.state = AgentState()
        self.assigned: GenerationAssignment | None = None
        self.ranks: Ranks | None = None
        self.has_news = True
        self.has_left = False

    @property
    def trains(self) -> bool:
        """Whether its ranks have made a step, and go on."""
        ranks = self.ranks
        return self.state.phase is AgentPhase.RUNNING and ranks is not None and ranks.first_step_at is not None

    # --- what it hears ------------------------------------------------------------------------------------

    def receive(self, assignment: Assignment) -> None:
        self.dispatch(AssignmentReceived(assignment=assignment))

    def hear(self, notices: tuple[Notice, ...], now: datetime) -> None:
        """The watcher of its node has these notices."""
        if self.state.notices != notices:
            self.dispatch(NoticesChanged(notices=notices, now=now))

    def terminate(self, deadline: datetime, now: datetime) -> None:
        """It gets SIGTERM, and SIGKILL at the deadline."""
        self.dispatch(SigtermReceived(notice=sigterm(self.node, deadline=deadline, now=now)))

    def dispatch(self, event: Event) -> None:
        """Feed an event to the state machine, and carry out its commands."""
        reaction = transition(self.state, event)
        if reaction.state != self.state:
            self.state = reaction.state
            self.report_soon()
        for command in reaction.commands:
            self._perform(command)

    def _perform(self, command: Command) -> None:
        match command:
            case StartGeneration(assignment=assignment):
                self.assigned, self.ranks = assignment, self.training.start(self, assignment)
            case RequestDrain() | CancelDrain():
                """The ranks look at `state.drain` after each step."""
            case KillGeneration():
                self.training.wake()
            case Leave():
                self.leave()
            case _:
                assert_never(command)

    def leave(self) -> None:
        self.has_left = True

    # --- what it reports ----------------------------------------------------------------------------------

    def report_soon(self) -> None:
        self.has_news = True

    def progress(self, now: datetime) -> Progress | None:
        """What its ranks report to it."""
        ranks = self.ranks if self.ranks is not None and self.ranks.number == self.state.generation else None
        return self.training.progress(ranks, now) if ranks is not None else None

    def report(
        self, now: datetime, *, warm: bool = True, port: int = 29500, replica_port: int | None = None
    ) -> AgentReport:
        self.has_news = False
        ranks = self.ranks if self.state.is_active else None
        return report_of(
            self.state,
            pod=self.pod,
            uid=self.uid,
            warm=warm,
            port=port,
            replica_port=replica_port,
            progress=self.progress(now),
            step_age_seconds=self.training.step_age(ranks, now) if ranks is not None else None,
            now=now,
        )


def report_of(
    state: AgentState,
    *,
    pod: str,
    uid: str,
    progress: Progress | None,
    now: datetime,
    port: int,
    replica_port: int | None = None,
    warm: bool = True,
    step_age_seconds: float | None = None,
) -> AgentReport:
    """What an agent in this state reports."""
    return AgentReport(
        pod=pod,
        pod_uid=uid,
        generation=state.generation,
        phase=state.phase,
        warm=warm,
        rendezvous_port=port,
        progress=progress,
        step_age_seconds=step_age_seconds,
        commit=state.commit or (progress.commit if progress is not None else None),
        failure=state.failure,
        notices=state.all_notices,
        replica_port=replica_port,
        sent_at=now,
    )
