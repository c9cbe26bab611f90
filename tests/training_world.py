"""The operator's real passes over one job in memory, and its agents.

The agents train, drain and commit. One turn is one second, in which a generation that runs makes a step.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from operator_world import KEY, World
from spottrain_api.contract.assignments import AgentPhase, AgentReport, Assignment, AssignmentAction
from spottrain_api.contract.reports import CommitRef, Progress, TrainerPhase
from spottrain_operator.core.facts.situation import BUSY
from spottrain_operator.kube.identities import PodIdentity
from spottrain_operator.kube.resources import Manifest

TOTAL_STEPS = 100_000


@dataclass
class Ranks:
    """What an agent runs: its share of one generation."""

    assigned: Assignment
    number: int
    phase: AgentPhase = AgentPhase.STARTING
    started: bool = False


@dataclass
class TrainingWorld(World):
    """A world whose agents follow their assignments, and whose ranks share one training.

    Args:
        step: Newest step of the generation that runs.
        start_step: The step that it resumed from.
        head: Newest commit.
        ends: Whether the script ends at its next step.
        trained: Number of steps that were made.
    """

    step: int = 0
    start_step: int = 0
    head: CommitRef | None = None
    ends: bool = False
    trained: int = 0
    ranks: dict[str, Ranks] = field(default_factory=dict)

    async def turn(self) -> None:
        await super().turn()
        self.ranks = {
            uid: each for uid, each in self.ranks.items() if uid in {_uid(pod) for pod in self.cluster.pods.values()}
        }
        self._train()

    async def _agent(self, pod: Manifest) -> None:
        uid = _uid(pod)
        assigned = await self.board.next(uid, after=None, timeout_seconds=0)
        if assigned is not None:
            self._obey(uid, assigned)
        ranks = self.ranks.get(uid)
        report = AgentReport(
            pod=pod["metadata"]["name"],
            pod_uid=uid,
            generation=ranks.number if ranks is not None else 0,
            phase=ranks.phase if ranks is not None else AgentPhase.IDLE,
            warm=True,
            rendezvous_port=4000,
            progress=self._progress(ranks) if ranks is not None and ranks.started else None,
            commit=self.head if ranks is not None and ranks.started else None,
            step_age_seconds=0.1,
            sent_at=self.now,
        )
        self.reports.put(PodIdentity(namespace=KEY.namespace, pod=pod["metadata"]["name"], uid=uid), report)

    def _obey(self, uid: str, assigned: Assignment) -> None:
        ranks = self.ranks.get(uid)
        number = assigned.generation.number if assigned.generation is not None else 0
        if assigned.action is AssignmentAction.RUN and (ranks is None or ranks.number < number):
            self.ranks[uid] = Ranks(assigned=assigned, number=number)
        elif ranks is not None and ranks.phase in BUSY and assigned.action is AssignmentAction.DRAIN:
            if ranks.started:
                self._commit(ranks.number)
            ranks.phase = AgentPhase.DRAINED
        elif ranks is not None and ranks.phase in BUSY and assigned.action is AssignmentAction.STOP:
            ranks.phase = AgentPhase.STOPPED

    def _train(self) -> None:
        """A step of the newest generation, if all its members are in it.

        They report that they are up a turn before their first step.
        """
        newest = max((each.number for each in self.ranks.values()), default=0)
        members = [each for each in self.ranks.values() if each.number == newest and each.phase in BUSY]
        assigned = members[0].assigned.generation if members else None
        if assigned is None or len(members) < assigned.num_nodes:
            return
        if any(each.phase is AgentPhase.STARTING for each in members):
            self.step = self.start_step = self.head.step if self.head is not None else 0
            for each in members:
                each.phase = AgentPhase.RUNNING
            return
        self.step, self.trained = self.step + 1, self.trained + 1
        if self.ends:
            self._commit(newest)
        for each in members:
            each.started, each.phase = True, AgentPhase.SUCCEEDED if self.ends else AgentPhase.RUNNING

    def _commit(self, number: int) -> None:
        self.head = CommitRef(
            generation=number, step=self.step, manifest=f"g{number}-s{self.step}", committed_at=self.now
        )

    def _progress(self, ranks: Ranks) -> Progress:
        return Progress(
            generation=ranks.number,
            phase=TrainerPhase.TRAINING,
            step=self.step,
            start_step=self.start_step,
            total_steps=TOTAL_STEPS,
            step_seconds=1.0,
            first_step_at=self.now,
            last_step_at=self.now,
            updated_at=self.now,
            commit=self.head,
        )

    @property
    def generation(self) -> dict[str, Any]:
        """The newest generation, as in the status; empty before the first."""
        return dict(self.status.get("generation", {}))

    def condition(self, kind: str) -> dict[str, Any]:
        """A condition of the job; empty if there is none."""
        return next((dict(each) for each in self.status.get("conditions", ()) if each["type"] == kind), {})


def _uid(pod: Manifest) -> str:
    return str(pod["metadata"]["uid"])
