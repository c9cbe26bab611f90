"""Which pods beyond the job's places may take those of members on dearer nodes."""

from __future__ import annotations

from collections.abc import Iterable

from spottrain_api.contract.assignments import CapacityType
from spottrain_api.v1alpha1.status import GenerationStatus, TrainingJobStatus
from spottrain_operator.core.facts.costs import USUAL_RATIO, has_price, price
from spottrain_operator.core.facts.restarts import restart_seconds
from spottrain_operator.core.facts.situation import PodFacts, Situation
from spottrain_operator.core.timing import seconds_between


def paid(situation: Situation, capacity_type: CapacityType, pool: str | None) -> float:
    """The price of a node. Without prices, a spot node is taken to cost half as much."""
    capacity = situation.spec.capacity
    if not has_price(capacity):
        return 1.0 if capacity_type is CapacityType.ON_DEMAND else USUAL_RATIO
    return price(capacity, capacity_type, pool) or 0.0


def paid_by_members(situation: Situation, generation: GenerationStatus, capacity_type: CapacityType) -> list[float]:
    """The price of each member's node of a type, the dearest first."""
    # The members of a generation never change.
    key = ("paid", generation.number, capacity_type)
    return situation.once(key, lambda: _paid_by_members(situation, generation, capacity_type))


def _paid_by_members(situation: Situation, generation: GenerationStatus, capacity_type: CapacityType) -> list[float]:
    members = (m for m in generation.members if m.capacity_type is capacity_type and m.pod_uid in situation.pods)
    return sorted((paid(situation, capacity_type, situation.pods[m.pod_uid].pod.pool) for m in members), reverse=True)


def saving_pays(situation: Situation, status: TrainingJobStatus, saved: float, now_paid: float) -> bool:
    """Whether the rest of the job saves more than a restart costs.

    If nobody knows how long the job still takes, it does.

    Args:
        situation: The job at one moment.
        status: What was decided so far.
        saved: Money per hour that the next generation saves.
        now_paid: Money per hour that the running one costs.
    """
    remaining = status.progress.eta_seconds
    return saved > 0 and (remaining is None or remaining * saved > restart_seconds(status) * now_paid)


def movers(situation: Situation, status: TrainingJobStatus, surplus: Iterable[PodFacts]) -> list[PodFacts]:
    """Those pods without a place that are to replace members on dearer nodes, the cheapest first.

    They are none if that would not pay. One that is up joins at the next restart, and gives up if there is none in
    `growth_longest`.
    """
    generation = status.running
    if generation is None or status.fallback_since is not None:
        return []
    found, saved, now_paid = [], 0.0, 0.0
    waiting = [f for f in surplus if not _waits_in_vain(situation, f)]
    for kind in CapacityType:
        prices = paid_by_members(situation, generation, kind)
        now_paid += sum(prices)
        of_type = ((paid(situation, kind, f.pod.pool), f) for f in waiting if f.pod.capacity_type is kind)
        for before, (after, facts) in zip(prices, sorted(of_type, key=lambda each: each[0]), strict=False):
            if after < before:
                found.append(facts)
                saved += before - after
    return found if saving_pays(situation, status, saved, now_paid) else []


def _waits_in_vain(situation: Situation, facts: PodFacts) -> bool:
    since = facts.pod.ready_since
    return since is not None and seconds_between(since, situation.now) > situation.timing.growth_longest
