"""Agents of tests/world that call the real control API, with the agent's own contact, relays included."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Iterable
from datetime import UTC, datetime
from pathlib import Path

import aiohttp

from benchmarks.scale.kubelets import RunningPod
from spottrain_agent import contact, relay, routes
from spottrain_agent.contact import Contact
from spottrain_agent.control_client import ControlClient
from spottrain_api.contract.assignments import AgentPhase, Assignment, AssignmentAction
from spottrain_api.contract.names import MAX_LONG_POLL_SECONDS
from spottrain_api.contract.reports import Progress
from spottrain_simulator.agents import Agent
from spottrain_simulator.notices import preemption
from spottrain_simulator.ranks import Pace, Training

logger = logging.getLogger(__name__)

PACE = Pace(start=1.0, step=0.5, save=1.0, commit_every=1200)
NUM_STEPS = 10_000_000
TICK_SECONDS = 0.02
# So that reports have the size of real ones.
MEASURED = {
    "loss": 2.5,
    "tokens_per_second": 123456.7,
    "data_wait_seconds": 0.01,
    "memory_bytes": 70 * 2**30,
    "checkpoint_interval": "every 10 min",
}
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


async def keep_training(trainings: Callable[[], Iterable[Training]]) -> None:
    """Let time pass for the ranks of these jobs."""
    while True:
        now = datetime.now(UTC)
        for training in trainings():
            training.advance(now)
        await asyncio.sleep(TICK_SECONDS)


class CallingAgent(Agent):
    """The agent of one pod. All agents of a job are in one process.

    `drained_at` is the time at which it was assigned to drain, or no longer to run. `address` is the folder with the
    operator's address. `changed` is for a subclass that tells others.
    """

    def __init__(
        self, session: aiohttp.ClientSession, address: Path, folder: Path, pod: RunningPod, training: Training
    ) -> None:
        super().__init__(pod.name, pod.uid, pod.node, training)
        token_file = folder / f"token-{self.uid}"
        token_file.write_text(pod.token)
        control = ControlClient(session, address, token_file, pod_uid=self.uid)
        self._contact = Contact("127.0.0.1", lambda: self.report(datetime.now(UTC)))
        self._task = asyncio.create_task(self._contact.keep(control, self.receive))
        self._task.add_done_callback(self._tell_failure)
        self.drained_at: float | None = None

    @property
    def num_reports(self) -> int:
        return self._contact.num_reports

    @property
    def phase(self) -> AgentPhase:
        return self.state.phase

    @property
    def node_rank(self) -> int | None:
        return self.assigned.node_rank if self.assigned is not None else None

    def stop(self) -> None:
        """End without a word, as a killed pod does."""
        self._task.cancel()
        self.training.lose(self)

    leave = stop

    def _tell_failure(self, task: asyncio.Task[None]) -> None:
        """A real agent would end with its pod; here, its pod would be silent for ever."""
        if not task.cancelled() and (error := task.exception()) is not None:
            logger.error("the agent of %s has failed", self.pod, exc_info=error)

    def take_notice(self, deadline: datetime) -> None:
        """Hear from the node's watcher that the node will be gone."""
        now = datetime.now(UTC)
        self.hear((preemption(self.node, deadline=deadline, observed_at=now),), now)

    def receive(self, assignment: Assignment) -> None:
        if self.drained_at is None and not self._goes_on(assignment):
            self.drained_at = time.monotonic()
        super().receive(assignment)
        self.changed()

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

    def report_soon(self) -> None:
        self._contact.report_soon()
        self.changed()

    def changed(self) -> None:
        """Phase, `trains`, node rank or `drained_at` may have changed."""

    def progress(self, now: datetime) -> Progress | None:
        progress = super().progress(now)
        return progress.model_copy(update=MEASURED) if progress is not None else None
