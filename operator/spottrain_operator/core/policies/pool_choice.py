"""In which pool the next pod goes: the cheapest of those that are likely to have a node.

A pool that the cloud took nodes of, or that had none for a pod, comes last for a while.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from datetime import datetime
from itertools import groupby

from spottrain_api.contract.assignments import CapacityType
from spottrain_api.v1alpha1.capacity import Pool
from spottrain_api.v1alpha1.status import AvoidedPool
from spottrain_operator.core.draft import Draft
from spottrain_operator.core.facts.costs import price
from spottrain_operator.core.facts.situation import PodFacts, Situation
from spottrain_operator.core.model import PodView
from spottrain_operator.core.timing import after, seconds_between

# While the cloud takes a node, each pass sees that. The status is written this often for it, in seconds.
_NEWS = 60.0


def avoid_reclaimed_pools(situation: Situation, draft: Draft) -> Draft:
    """Note the pools whose spot nodes the cloud takes."""
    lost = [facts.pod for facts in situation.pods.values() if _is_taken(facts)]
    until = after(situation.now, situation.timing.pool_avoidance)
    return _avoid(situation, draft, lost, until, "The cloud takes a node of it")


def avoid_dry_pools(situation: Situation, draft: Draft, waiting: Iterable[PodView], *, until: datetime) -> Draft:
    """Note the pools that had no node for these pods."""
    return _avoid(situation, draft, waiting, until, "It had no node for a pod")


def pools_by_preference(situation: Situation, draft: Draft, capacity_type: CapacityType, turn: int = 0) -> list[str]:
    """Names of the pools of a type that get new pods, the best first.

    Those that are avoided come last, the one first that is avoided least long. Then weight and price decide. Equal
    ones take turns.
    """
    capacity = situation.spec.capacity
    of_type = [pool for pool in capacity.pools if pool.kind is capacity_type]
    usable = [pool for pool in of_type if pool.weight > 0] or of_type
    avoided = {each.name: each.until for each in _still_avoided(situation, draft, capacity_type)}

    def rank(pool: Pool) -> tuple[float, int, float]:
        until = avoided.get(pool.name)
        paid = price(capacity, capacity_type, pool.name)
        return (0.0 if until is None else until.timestamp(), -pool.weight, math.inf if paid is None else paid)

    equals = [list(dict.fromkeys(pool.name for pool in each)) for _, each in groupby(sorted(usable, key=rank), rank)]
    in_turn = (name for each in equals for name in [*each[turn % len(each) :], *each[: turn % len(each)]])
    return list(dict.fromkeys(in_turn))


def _is_taken(facts: PodFacts) -> bool:
    pod = facts.pod
    announced = facts.coming_loss is not None and not pod.deleting
    return pod.capacity_type is CapacityType.SPOT and (announced or facts.unreachable)


def _avoid(situation: Situation, draft: Draft, pods: Iterable[PodView], until: datetime, message: str) -> Draft:
    """Note the pools of these pods, unless the job has no other pool of their type."""
    avoided = {
        (each.name, each.capacity_type): each
        for kind in CapacityType
        for each in _still_avoided(situation, draft, kind)
    }
    for pod in pods:
        others = {pool.name for pool in situation.spec.capacity.pools if pool.kind is pod.capacity_type}
        if pod.pool not in others or len(others) == 1:
            continue
        key = (pod.pool, pod.capacity_type.value)
        if key not in avoided or seconds_between(avoided[key].until, until) >= _NEWS:
            avoided[key] = AvoidedPool(name=pod.pool, capacity_type=key[1], until=until, message=message)
    kept = tuple(avoided.values())
    return draft if kept == draft.status.avoided_pools else draft.update(avoided_pools=kept)


def _still_avoided(situation: Situation, draft: Draft, capacity_type: CapacityType) -> list[AvoidedPool]:
    """Those that the job still has, so that edits don't add up."""
    names = {pool.name for pool in situation.spec.capacity.pools if pool.kind is capacity_type}
    return [
        each
        for each in draft.status.avoided_pools
        if each.capacity_type == capacity_type and each.name in names and each.until > situation.now
    ]
