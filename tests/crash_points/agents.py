"""Simulated agents.

Their ranks stop after the same step, commit it, and resume from it.
"""

from __future__ import annotations

import time
from datetime import UTC, datetime
from pathlib import Path

import aiohttp
from benchmarks.scale.agents import SimulatedAgent
from benchmarks.scale.kubelets import RunningPod

from spottrain_agent.agent_state import GenerationEnded, ProcessesGone
from spottrain_api.contract.assignments import AgentPhase, GenerationAssignment
from spottrain_api.contract.reports import CommitRef, Progress, TrainerPhase

STEP_SECONDS = 0.05
START_SECONDS = 0.2
DRAIN_SECONDS = 0.3


class Course:
    """The steps of one job, on which its ranks agree.

    `start_step` is that of the commit from which they resumed.
    """

    def __init__(self) -> None:
        self._generation = 0
        self.start_step = 0
        self._began_at = 0.0
        self._commit: CommitRef | None = None
        self._stopped: int | None = None

    def begin(self, generation: int) -> None:
        """Make the first step of a generation, the one after the commit."""
        if generation > self._generation:
            self._generation, self._began_at, self._stopped = generation, time.monotonic(), None
            self.start_step = self._commit.step if self._commit is not None else 0

    def step(self) -> int:
        if self._stopped is not None:
            return self._stopped
        return self.start_step + 1 + int((time.monotonic() - self._began_at) / STEP_SECONDS)

    def stop(self, generation: int) -> None:
        """Stop after the present step, and commit it."""
        if generation == self._generation and self._stopped is None:
            self._stopped = step = self.step()
            self._commit = CommitRef(
                generation=generation, step=step, manifest=f"manifest-{step}.json", committed_at=datetime.now(UTC)
            )

    def commit(self) -> CommitRef | None:
        return self._commit


class TrainingAgent(SimulatedAgent):
    """The agent of one pod. `course` is that of its job."""

    start_seconds = START_SECONDS
    drain_seconds = DRAIN_SECONDS

    def __init__(
        self, session: aiohttp.ClientSession, address: Path, folder: Path, pod: RunningPod, course: Course
    ) -> None:
        super().__init__(session, address, folder, pod)
        self._course = course

    def start_ranks(self, assignment: GenerationAssignment) -> None:
        self._course.begin(assignment.number)
        super().start_ranks(assignment)

    def drain_ranks(self, number: int) -> None:
        self._course.stop(number)
        super().drain_ranks(number)

    def succeed(self) -> None:
        """Make the job's last step."""
        number = self.state.generation
        self._course.stop(number)
        self.dispatch(GenerationEnded(generation=number, phase=AgentPhase.SUCCEEDED, commit=self.commit()))
        self.dispatch(ProcessesGone(generation=number))

    def step(self) -> int:
        return self._course.step()

    def commit(self) -> CommitRef | None:
        return self._course.commit()

    def progress(self) -> Progress | None:
        progress = super().progress()
        if progress is None:
            return None
        progress = progress.model_copy(update={"start_step": self._course.start_step})
        if self.phase is not AgentPhase.SUCCEEDED:
            return progress
        return progress.model_copy(update={"phase": TrainerPhase.DONE, "total_steps": progress.step})
