"""Agents without ranks, whose training only counts.

They run the agent's own state machine and contact with the operator, relays included.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import assert_never

import aiohttp

from benchmarks.scale.kubelets import RunningPod
from spottrain_agent import contact, relay, routes
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
    StartGeneration,
    transition,
)
from spottrain_agent.contact import Contact
from spottrain_agent.control_client import ControlClient
from spottrain_api.contract.assignments import (
    AgentPhase,
    AgentReport,
    Assignment,
    AssignmentAction,
    GenerationAssignment,
)
from spottrain_api.contract.names import MAX_LONG_POLL_SECONDS
from spottrain_api.contract.notices import Notice
from spottrain_api.contract.reports import CommitRef, Progress, TrainerPhase

logger = logging.getLogger(__name__)

START_SECONDS = 1.0
DRAIN_SECONDS = 1.0
STEP_SECONDS = 0.5
COMMIT_SECONDS = 600.0
NUM_STEPS = 10_000_000
# Many agents share an event loop, which is seconds late when many have work at once. An agent on a node of its own is
# not, and its partners must not take it for one that hangs.
PATIENCE_SECONDS = 30.0


def be_patient() -> None:
    """Lengthen the times within which agents and relays must answer one another.

    What the operator sees stays: news go out at once, and a connection that is closed is noticed at once. Only the
    repetitions of news, 1, 2 and 4 s later, may come up to 5 s later.
    """
    patient = aiohttp.ClientTimeout(sock_connect=PATIENCE_SECONDS, sock_read=2 * MAX_LONG_POLL_SECONDS)
    routes.POLL_TIMEOUT = routes.RELAY_POLL_TIMEOUT = routes.RELAY_REPORT_TIMEOUT = patient
    routes.FIRST_REPORT_SECONDS = routes.CONNECT_SECONDS = PATIENCE_SECONDS
    relay.UNKNOWN_PEER_SECONDS = relay.BETWEEN_POLLS_SECONDS = PATIENCE_SECONDS
    routes.BEAT_SECONDS = PATIENCE_SECONDS / 3
    # Of all their news, these agents tell themselves. Looking for more takes a core with 8,000 of them.
    contact.LOOK_SECONDS = 5.0


class Rendezvous:
    """Lets the members of a generation make their first step together, as ranks do."""

    def __init__(self) -> None:
        self._waiting: dict[str, list[SimulatedAgent]] = {}

    def join(self, agent: SimulatedAgent, assignment: GenerationAssignment) -> None:
        """Wait for the other members. The last one to come begins the steps of all."""
        waiting = self._waiting.setdefault(assignment.rendezvous_id, [])
        waiting.append(agent)
        if len(waiting) == assignment.num_nodes:
            for each in self._waiting.pop(assignment.rendezvous_id):
                each.begin_steps(assignment.number)


class SimulatedAgent:
    """The agent of one pod. All agents of a job are in one process.

    `drained_at` is the time at which it was assigned to drain, or no longer to run. `address` is the folder with the
    operator's address. A subclass may train differently: `start_ranks`, `drain_ranks`, `step`, `commit`, `progress`.
    `changed` is for one that tells others.
    """

    start_seconds = START_SECONDS
    drain_seconds = DRAIN_SECONDS
    rendezvous = Rendezvous()

    def __init__(self, session: aiohttp.ClientSession, address: Path, folder: Path, pod: RunningPod) -> None:
        self.pod, self.uid, self.node, self.token = pod.name, pod.uid, pod.node, pod.token
        token_file = folder / f"token-{self.uid}"
        token_file.write_text(self.token)
        self._control = ControlClient(session, address, token_file, pod_uid=self.uid)
        self._contact = Contact("127.0.0.1", self._report)
        self.state = AgentState()
        self._started_at = 0.0
        self._first_step_at: datetime | None = None
        self._task = asyncio.create_task(self._contact.keep(self._control, self._on_assignment))
        self._task.add_done_callback(self._tell_failure)
        self._later: list[asyncio.TimerHandle] = []
        self.node_rank: int | None = None
        self.drained_at: float | None = None

    @property
    def num_reports(self) -> int:
        return self._contact.num_reports

    @property
    def phase(self) -> AgentPhase:
        return self.state.phase

    @property
    def trains(self) -> bool:
        return self.state.phase is AgentPhase.RUNNING and self._first_step_at is not None

    def stop(self) -> asyncio.Task[None]:
        """End without a word, as a killed pod does. Returns what ends."""
        self._task.cancel()
        for handle in self._later:
            handle.cancel()
        return self._task

    def _tell_failure(self, task: asyncio.Task[None]) -> None:
        """A real agent would end with its pod; here, its pod would be silent for ever."""
        if not task.cancelled() and (error := task.exception()) is not None:
            logger.error("the agent of %s has failed", self.pod, exc_info=error)

    def take_notice(self, deadline: datetime) -> None:
        """Hear from the node's watcher that the node will be gone."""
        now = datetime.now(UTC)
        notice = Notice(id=f"ec2-{self.node}", node=self.node, source="ec2", deadline=deadline, observed_at=now)
        self.dispatch(NoticesChanged(notices=(notice,), now=now))

    def _on_assignment(self, assignment: Assignment) -> None:
        if self.drained_at is None and not self._goes_on(assignment):
            self.drained_at = time.monotonic()
        self.dispatch(AssignmentReceived(assignment=assignment))

    def _goes_on(self, assignment: Assignment) -> bool:
        """Whether the present generation stays.

        On a busy machine, the drain may be over before the agent hears of it.
        """
        generation = assignment.generation
        return (
            assignment.action is AssignmentAction.RUN
            and generation is not None
            and generation.number == self.state.generation
        )

    def dispatch(self, event: Event) -> None:
        step = transition(self.state, event)
        if step.state != self.state:
            self.state = step.state
            self._contact.report_soon()
        for command in step.commands:
            self._perform(command)
        self.changed()

    def changed(self) -> None:
        """Phase, `trains`, node rank or `drained_at` may have changed."""

    def _after(self, seconds: float, do: Callable[[], None]) -> None:
        self._later = [each for each in self._later if each.when() > time.monotonic()]
        self._later.append(asyncio.get_running_loop().call_later(seconds, do))

    def _perform(self, command: Command) -> None:
        match command:
            case StartGeneration(assignment=assignment):
                self.node_rank = assignment.node_rank
                self._started_at, self._first_step_at = time.monotonic(), None
                self._after(self.start_seconds, lambda: self.start_ranks(assignment))
            case RequestDrain(generation=number):
                self._after(self.drain_seconds, lambda: self.drain_ranks(number))
            case KillGeneration(generation=number):
                self._after(0.0, lambda: self.dispatch(ProcessesGone(generation=number)))
            case CancelDrain():
                pass
            case Leave():
                self.stop()
            case _:
                assert_never(command)

    def start_ranks(self, assignment: GenerationAssignment) -> None:
        self.dispatch(RanksStarted(generation=assignment.number))
        self.rendezvous.join(self, assignment)

    def begin_steps(self, number: int) -> None:
        """All members of generation `number` have started."""
        if self.state.generation == number and self.state.is_active:
            self._first_step_at = datetime.now(UTC)
            self._contact.report_soon()
            self.changed()

    def drain_ranks(self, number: int) -> None:
        self.dispatch(DrainSeen(generation=number))
        self.dispatch(GenerationEnded(generation=number, phase=AgentPhase.DRAINED, commit=self.commit()))
        self.dispatch(ProcessesGone(generation=number))

    def step(self) -> int:
        return int((time.monotonic() - self._started_at) / STEP_SECONDS)

    def commit(self) -> CommitRef | None:
        if self._first_step_at is None:
            return None
        number = int((time.monotonic() - self._started_at) / COMMIT_SECONDS)
        step = int(number * COMMIT_SECONDS / STEP_SECONDS) or 1
        return CommitRef(
            generation=self.state.generation,
            step=step,
            manifest=f"attempts/g{self.state.generation}/manifest-{step}.json",
            committed_at=self._first_step_at + timedelta(seconds=number * COMMIT_SECONDS),
        )

    def progress(self) -> Progress | None:
        if self._first_step_at is None or not self.state.generation:
            return None
        now = datetime.now(UTC)
        return Progress(
            generation=self.state.generation,
            phase=TrainerPhase.TRAINING,
            step=self.step(),
            total_steps=NUM_STEPS,
            loss=2.5,
            tokens_per_second=123456.7,
            step_seconds=STEP_SECONDS,
            data_wait_seconds=0.01,
            memory_bytes=70 * 2**30,
            first_step_at=self._first_step_at,
            last_step_at=now,
            updated_at=now,
            commit=self.commit(),
            checkpoint_interval="every 10 min",
        )

    def _report(self) -> AgentReport:
        state, progress = self.state, self.progress()
        return AgentReport(
            pod=self.pod,
            pod_uid=self.uid,
            generation=state.generation,
            phase=state.phase,
            warm=True,
            rendezvous_port=29500,
            progress=progress,
            step_age_seconds=STEP_SECONDS / 2 if progress and state.is_active else None,
            commit=state.commit or (progress.commit if progress else None),
            failure=state.failure,
            notices=state.all_notices,
            sent_at=datetime.now(UTC),
        )
