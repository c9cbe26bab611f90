"""The ranks of all generations: they meet, make steps, commit and end."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from simulation.parts import START_SECONDS, STEP_SECONDS, Pod, Ranks, Training, at
from spottrain_api.contract.assignments import AgentPhase
from spottrain_api.contract.reports import CommitRef, Failure, FailureReason

COMMIT_SECONDS = 0.75
COMMIT_EVERY = 20


@dataclass
class Trainings:
    """The training of each generation, and the checkpoints that they share."""

    total_steps: int
    of: dict[int, Training] = field(default_factory=dict)
    head: CommitRef | None = None
    fence: int = 0
    fail_next_step: int | None = None  # generation in which a rank raises on its next step
    hang: set[int] = field(default_factory=set)
    time: float = 0.0
    pods: Sequence[Pod] = ()

    def move(self, time: float, pods: Sequence[Pod]) -> None:
        """Let time pass for the ranks of these pods."""
        self.time, self.pods = time, pods
        for number, training in self.of.items():
            ranks = self._running(number)
            if ranks:
                self._move(number, training, ranks)

    def _running(self, number: int) -> list[Ranks]:
        all_ranks = [p.ranks for p in self.pods if p.ranks is not None and not p.dead]
        phases = (AgentPhase.STARTING, AgentPhase.RUNNING)
        return [r for r in all_ranks if r.generation == number and r.phase in phases]

    def _move(self, number: int, training: Training, ranks: list[Ranks]) -> None:
        if training.started is None:
            if len(ranks) == training.world:
                self._rendezvous(number, training, ranks)
        elif len(ranks) < training.world:
            if number not in self.hang:
                self._end(ranks, AgentPhase.FAILED, Failure(reason=FailureReason.LOST_PEER, message="a peer left"))
        elif self.time >= training.started + START_SECONDS and number not in self.hang:
            self._train(number, training, ranks)

    def _rendezvous(self, number: int, training: Training, ranks: list[Ranks]) -> None:
        if number < self.fence:
            failure = Failure(reason=FailureReason.LOST_PEER, message="fenced", fence=self.fence)
            return self._end(ranks, AgentPhase.FAILED, failure)
        training.started = self.time
        self.fence = max(self.fence, number)
        training.step = training.start_step = self.head.step if self.head is not None else 0
        for r in ranks:
            r.phase = AgentPhase.RUNNING
            r.commit = self.head

    def _train(self, number: int, training: Training, ranks: list[Ranks]) -> None:
        if training.draining_until is not None:
            if self.time >= training.draining_until:
                self._commit(number, training, ranks)
                self._end(ranks, AgentPhase.DRAINED)
            return
        if self.time < training.next_step:
            return
        if self.fail_next_step == number:
            self.fail_next_step = None
            self._end(
                ranks[:1], AgentPhase.FAILED, Failure(reason=FailureReason.SCRIPT_ERROR, message="ValueError: x")
            )
            return
        if training.step >= self.total_steps:
            self._commit(number, training, ranks)
            self._end(ranks, AgentPhase.SUCCEEDED)
            return
        training.step += 1
        training.last_step_at = at(self.time)
        training.first_step_at = training.first_step_at or at(self.time)
        training.next_step = self.time + STEP_SECONDS
        if any(r.drain for r in ranks):
            training.draining_until = self.time + COMMIT_SECONDS
            for r in ranks:
                r.drain_seen = at(self.time)
        elif training.step % COMMIT_EVERY == 0:
            self._commit(number, training, ranks)

    def _commit(self, number: int, training: Training, ranks: list[Ranks]) -> None:
        if number < self.fence:
            return  # a fenced generation's commit loses
        self.head = CommitRef(
            generation=number, step=training.step, manifest=f"g{number}-s{training.step}", committed_at=at(self.time)
        )
        for r in ranks:
            r.commit = self.head

    def _end(self, ranks: list[Ranks], phase: AgentPhase, failure: Failure | None = None) -> None:
        for r in ranks:
            r.phase, r.failure = phase, failure
        for pod in self.pods:
            if pod.ranks in ranks:
                pod.next_report = self.time
