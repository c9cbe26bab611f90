"""Whether interruptions of spot nodes cost more than spot nodes save."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime

from spottrain_api.contract.assignments import CapacityType
from spottrain_api.v1alpha1.status import TrainingJobStatus, Transition
from spottrain_operator.core.facts.causes import PREEMPTIONS
from spottrain_operator.core.facts.costs import USUAL_RATIO, price
from spottrain_operator.core.facts.places import demand_of
from spottrain_operator.core.facts.situation import Situation
from spottrain_operator.core.timing import after, seconds_between


@dataclass(frozen=True, slots=True, kw_only=True)
class Unrest:
    """The cloud takes nodes so often that on-demand nodes cost less per step.

    Attributes:
        share_lost: Of the time, without a step or with steps that were redone.
        until: When spot nodes are worth it again, if none is taken before.
    """

    share_lost: float
    until: datetime


def unrest(situation: Situation, status: TrainingJobStatus) -> Unrest | None:
    """Whether spot nodes are not worth it at present, by what interruptions cost in the last hour."""
    window, now = situation.timing.unrest_window, situation.now
    recent = [t for t in status.transitions if t.reason in PREEMPTIONS and after(t.at, window) > now]
    ended = [t for t in recent if t.seconds_without_step is not None]
    worth = 1 - _price_ratio(situation)
    share = _share_lost(situation, status, ended)
    if len(ended) < situation.timing.unrest_interruptions or share <= worth:
        return None
    left, until = ended, now
    while len(left) >= situation.timing.unrest_interruptions and _share_lost(situation, status, left) > worth:
        until, left = after(left[0].at, window), left[1:]
    return Unrest(share_lost=share, until=until)


def _price_ratio(situation: Situation) -> float:
    """What the job's nodes cost, compared with as many on-demand nodes."""
    capacity, wanted = situation.spec.capacity, demand_of(situation)
    on_demand, spot = (price(capacity, kind, None) for kind in (CapacityType.ON_DEMAND, CapacityType.SPOT))
    ratio = spot / on_demand if on_demand and spot is not None else USUAL_RATIO
    return (wanted.on_demand + wanted.spot * min(1.0, ratio)) / max(1, wanted.total)


def _share_lost(situation: Situation, status: TrainingJobStatus, interruptions: Sequence[Transition]) -> float:
    lost = sum(
        (each.seconds_without_step or 0.0) + (each.steps_redone or 0) * _step_seconds(status)
        for each in interruptions
    )
    window = situation.timing.unrest_window
    age = seconds_between(status.start_time or situation.now, situation.now)
    return min(1.0, lost / max(window / 4, min(window, age)))  # the first minutes say little


def _step_seconds(status: TrainingJobStatus) -> float:
    progress = status.progress
    left = (progress.total_steps or 0) - progress.step
    return progress.eta_seconds / left if progress.eta_seconds is not None and left > 0 else 0.0
