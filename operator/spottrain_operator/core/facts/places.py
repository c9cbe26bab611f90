"""Which pods keep their place in the job, and how many more it wants."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

from spottrain_api.contract.assignments import CapacityType
from spottrain_api.v1alpha1.status import GenerationStatus, TrainingJobStatus
from spottrain_operator.core.facts.deadline import waits_for_spot
from spottrain_operator.core.facts.demand import Demand, demand
from spottrain_operator.core.facts.moves import movers, paid
from spottrain_operator.core.facts.queue import granted
from spottrain_operator.core.facts.situation import PodFacts, Situation
from spottrain_operator.core.timing import seconds_between


def demand_of(situation: Situation) -> Demand:
    """What the job wants.

    If its spec isn't understood, the pools that are may not be all. In a queue, it has what Kueue grants at most.
    While there is time to wait for spot nodes, no on-demand nodes stand in for them.
    """
    wanted = demand(situation.spec, knows_pools=not situation.observed.job.left_out)
    quota = granted(situation)
    if quota is not None:
        wanted = Demand(
            on_demand=min(wanted.on_demand, quota[CapacityType.ON_DEMAND]),
            spot=min(wanted.spot, quota[CapacityType.SPOT]),
            max_on_demand=min(wanted.max_on_demand, quota[CapacityType.ON_DEMAND]),
        )
    return replace(wanted, max_on_demand=wanted.on_demand) if waits_for_spot(situation) else wanted


@dataclass(frozen=True, slots=True, kw_only=True)
class Places:
    """Uids of the pods to keep, and how many more of each type to create.

    Attributes:
        prewarmed: Pods beyond these. They wait to replace members whose nodes may be taken, or cost more.
    """

    kept: tuple[str, ...]
    prewarmed: tuple[str, ...]
    missing_on_demand: int
    missing_spot: int
    missing_prewarmed: int


def places(
    situation: Situation,
    status: TrainingJobStatus,
    *,
    between_generations: bool = False,
    leaving: frozenset[str] = frozenset(),
) -> Places:
    """Which pods keep their place, and what is missing.

    On-demand pods beyond the floor, from a fallback, keep their place until as many spot pods are up. This doesn't
    break up a running generation: they stay members until it ends for another reason, such as growth.

    Args:
        situation: The job at one moment.
        status: What was decided so far.
        between_generations: Decide as if the running generation had ended.
        leaving: Decide as if these pods, by uid, were gone.
    """
    # The members of a generation never change.
    generation = status.generation
    which = (generation.number, generation.state) if generation is not None else None
    key = ("places", which, status.fallback_since, between_generations, leaving)
    return situation.once(key, lambda: _places(situation, status, between_generations, leaving))


def _places(
    situation: Situation, status: TrainingJobStatus, between_generations: bool, leaving: frozenset[str]
) -> Places:
    wanted = demand_of(situation)
    generation = None if between_generations else status.running
    known = {m.pod_uid for m in status.generation.members} if status.generation is not None else set()
    on_demand, spot = _holding(situation, known, leaving, by_price=generation is None)
    if status.fallback_since is None:
        num_spot, num_on_demand = wanted.spot, wanted.on_demand
    else:
        num_spot = min(wanted.spot, sum(f.pod.node is not None for f in spot))
        num_on_demand = min(wanted.max_on_demand, wanted.total - num_spot)
    train = {m.pod_uid for m in status.running.members} if status.running is not None else set()
    up = sum(f.candidate or f.pod.uid in train for f in spot[:num_spot])
    keep = max(num_on_demand, min(wanted.max_on_demand, wanted.total - up))
    replaced = bool(situation.observed.job.left_out)  # the default may stand for a limit
    if replaced:
        keep = max(keep, min(len(on_demand), situation.spec.nodes.max - len(spot[:num_spot])))
    if generation is not None and (_fits(generation, wanted) or replaced):
        keep = max(keep, sum(m.capacity_type is CapacityType.ON_DEMAND for m in generation.members))
    kept = (*on_demand[:keep], *spot[:num_spot])
    missing_on_demand, missing_spot = max(0, num_on_demand - len(on_demand)), max(0, num_spot - len(spot))
    prewarmed, num_prewarmed = _prewarmed(situation, status, spot[:num_spot], spot[num_spot:])
    # Pods that are to join anyway replace such a member as well.
    full = not (missing_on_demand or missing_spot) and all(f.pod.uid in known for f in kept)
    spare = [f for f in (*on_demand[keep:], *spot[num_spot:]) if f not in prewarmed]
    moving = movers(situation, status, spare) if generation is not None else []
    return Places(
        kept=tuple(f.pod.uid for f in kept),
        prewarmed=tuple(f.pod.uid for f in (*prewarmed, *moving)),
        missing_on_demand=missing_on_demand,
        missing_spot=missing_spot,
        missing_prewarmed=max(0, num_prewarmed - len(prewarmed)) if full and generation is not None else 0,
    )


def _prewarmed(
    situation: Situation, status: TrainingJobStatus, kept: list[PodFacts], surplus: list[PodFacts]
) -> tuple[list[PodFacts], int]:
    """The surplus spot pods that stay as replacements, and how many there should be.

    There should be one for each member whose node may be taken. One that is young stays without such a member, too.
    """
    if status.generation is None or status.fallback_since is not None or granted(situation) is not None:
        return [], 0
    members, most = {m.pod_uid for m in status.generation.members}, situation.spec.capacity.spot.max_prewarmed
    wanted = min(most, sum(f.at_risk and f.pod.uid in members for f in kept))
    young = (
        f
        for f in surplus[wanted:most]
        if seconds_between(f.pod.created_at, situation.now) < situation.timing.prewarmed_stay
    )
    return [*surplus[:wanted], *young], wanted


def _fits(generation: GenerationStatus, wanted: Demand) -> bool:
    """Whether the user's limits allow the generation as it is."""
    num_on_demand = sum(m.capacity_type is CapacityType.ON_DEMAND for m in generation.members)
    num_spot = len(generation.members) - num_on_demand
    return (
        num_on_demand <= wanted.max_on_demand and num_spot <= wanted.spot and num_on_demand + num_spot <= wanted.total
    )


def _holding(
    situation: Situation, known: set[str], leaving: frozenset[str], *, by_price: bool
) -> tuple[list[PodFacts], list[PodFacts]]:
    """On-demand and spot pods that hold a place, in the order in which to keep them.

    Those that train, or did last, come first. Then those that are up, those that have a node, and the oldest. By
    price, the cheapest of those that could train come before.
    """

    def worth(facts: PodFacts) -> tuple[float, bool, bool, bool, int]:
        pod = facts.pod
        price = math.inf
        if by_price and (facts.candidate or pod.uid in known):
            price = paid(situation, pod.capacity_type, pod.pool)
        return (price, pod.uid not in known, not pod.ready, pod.node is None, pod.sequence)

    holding = sorted((f for uid, f in situation.pods.items() if f.holds_place and uid not in leaving), key=worth)
    on_demand = [f for f in holding if f.pod.capacity_type is CapacityType.ON_DEMAND]
    return on_demand, [f for f in holding if f.pod.capacity_type is CapacityType.SPOT]
