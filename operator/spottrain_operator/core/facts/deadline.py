"""How much time the job can lose and still finish by capacity.finishBy, and what follows for its nodes."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime

from spottrain_api.contract.conditions import ConditionType, EventReason
from spottrain_api.v1alpha1.status import TrainingJobStatus
from spottrain_operator.core.facts.demand import demand
from spottrain_operator.core.facts.progress import newest_progress
from spottrain_operator.core.facts.restarts import restart_seconds
from spottrain_operator.core.facts.situation import Situation
from spottrain_operator.core.timing import seconds_between

# Part of the work that is kept in reserve: a step may take longer on other nodes.
_RESERVED_SHARE = 0.02
# So many changes of nodes are kept in reserve: one to on-demand nodes, and one that nobody foresees.
_RESERVED_CHANGES = 2
# A job that has begun to use on-demand nodes waits for spot nodes again with this many times the reserve.
_MUCH = 2.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Deadline:
    """capacity.finishBy, and what the job still needs, in seconds.

    Attributes:
        left: Until then.
        needed: For the steps that are left, on as many on-demand nodes as the job may have.
        change: For a change of nodes: a new node and a restart.
    """

    by: datetime
    left: float
    needed: float
    change: float

    @property
    def slack(self) -> float:
        return self.left - self.needed

    @property
    def reserve(self) -> float:
        return _RESERVED_CHANGES * self.change + _RESERVED_SHARE * self.needed


def deadline_of(situation: Situation) -> Deadline | None:
    """The deadline; None without one, and before the job's first steps show how long the rest takes."""
    return situation.once("deadline", lambda: _deadline_of(situation))


def waits_for_spot(situation: Situation) -> bool:
    """Whether there is time to wait for spot nodes, so that no on-demand nodes stand in for them."""
    deadline = deadline_of(situation)
    if deadline is None or deadline.left <= 0:
        return False
    return deadline.slack > deadline.reserve * (_MUCH if _hurried(situation) else 1.0)


def hurries(situation: Situation) -> bool:
    """Whether on-demand nodes have to stand in at once for spot nodes that are missing."""
    deadline = deadline_of(situation)
    return deadline is not None and deadline.left > 0 and not waits_for_spot(situation)


def stays_on_demand(situation: Situation) -> bool:
    """Whether there is no time for a change back to spot nodes."""
    deadline = deadline_of(situation)
    return deadline is not None and hurries(situation) and deadline.slack < deadline.change


def _hurried(situation: Situation) -> bool:
    known = situation.observed.job.status.condition(ConditionType.ON_TIME)
    return known is not None and known.reason in (EventReason.NO_SLACK_LEFT, EventReason.DEADLINE_OUT_OF_REACH)


def _deadline_of(situation: Situation) -> Deadline | None:
    by, status = situation.spec.capacity.finish_by, situation.observed.job.status
    node_seconds = _node_seconds_left(situation, status)
    num_nodes = min(demand(situation.spec).max_on_demand, situation.spec.nodes.max)
    if by is None or node_seconds is None or num_nodes == 0:
        return None
    restart = restart_seconds(status)
    return Deadline(
        by=by,
        left=seconds_between(situation.now, by),
        needed=node_seconds / num_nodes + (restart if status.running is None else 0.0),
        change=restart + situation.timing.pool_patience,
    )


def _node_seconds_left(situation: Situation, status: TrainingJobStatus) -> float | None:
    """How long one node would take for the steps that are left; None if nobody knows.

    A step of twice as many nodes takes half as long.
    """
    generation, progress = status.generation, status.progress
    if generation is None:
        return None
    newest = newest_progress(situation, generation)
    if newest is not None and newest.step_seconds and newest.total_steps is not None and newest.step > 0:
        return max(0, newest.total_steps - newest.step) * newest.step_seconds * len(generation.members)
    if progress.eta_seconds is None:
        return None
    first = generation.first_step_at
    if first is not None and progress.last_step_at is not None and progress.last_step_at >= first:
        return progress.eta_seconds * len(generation.members)
    before = status.transitions[-1].world_size_before if status.transitions else 0
    return progress.eta_seconds * (before // situation.spec.processes_per_node or len(generation.members))
