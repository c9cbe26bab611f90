"""What the job's nodes cost."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import datetime

from spottrain_api.contract.assignments import CapacityType
from spottrain_api.cost_record import add_pools
from spottrain_api.v1alpha1.capacity import Capacity, Pool, PoolType
from spottrain_api.v1alpha1.status import CostStatus, PoolCost
from spottrain_operator.core.facts.daily_costs import Charge, add_charges, parts_by_day
from spottrain_operator.core.facts.situation import PodFacts, Situation

# Without prices, spot nodes are taken to cost this share of on-demand nodes.
USUAL_RATIO = 0.5
_SECONDS_PER_HOUR = 3600.0


def has_price(capacity: Capacity) -> bool:
    """Whether any cost can be counted."""
    return any(price(capacity, each, None) is not None for each in CapacityType)


def price(capacity: Capacity, capacity_type: CapacityType, pool: str | None) -> float | None:
    """Price per hour of a node: that of the pool, or that of its capacity type.

    None: unknown.
    """
    of_type = [p for p in capacity.pools if p.kind is capacity_type]
    own = next((each for p in of_type if p.name == pool and (each := _own_price(p)) is not None), None)
    if own is not None:
        return own
    general = capacity.on_demand if capacity_type is CapacityType.ON_DEMAND else capacity.spot
    if general.price_per_hour is not None:
        return general.price_per_hour
    bought = (p.price_per_hour for p in of_type if p.capacity_type is not PoolType.RESERVED)
    return next((each for each in bought if each is not None), None)


def _own_price(pool: Pool) -> float | None:
    if pool.price_per_hour is None and pool.capacity_type is PoolType.RESERVED:
        return 0.0
    return pool.price_per_hour


def accounting_time(situation: Situation) -> tuple[datetime, datetime]:
    """From when to when nodes are yet to be charged.

    An operator with another clock has charged up to its own time.
    """
    since = situation.observed.job.status.accounted_at or situation.now
    return since, max(situation.now, since)


def cost_now(situation: Situation) -> CostStatus | None:
    """What the job has cost up to now; None if no price is known.

    It is what the status recorded, and the nodes that the job's pods hold since then.
    """
    return situation.once("cost", lambda: _cost_now(situation))


def rate(situation: Situation) -> float:
    """Money per second that the nodes cost which the job holds now."""
    capacity = situation.spec.capacity
    prices = (price(capacity, f.pod.capacity_type, f.pod.pool) or 0.0 for f in _held(situation))
    return sum(prices) / _SECONDS_PER_HOUR


def _cost_now(situation: Situation) -> CostStatus | None:
    capacity, recorded = situation.spec.capacity, situation.observed.job.status
    if not has_price(capacity):
        return recorded.cost
    since, now = accounting_time(situation)
    before = recorded.cost or CostStatus(currency=capacity.currency)
    if before.currency != capacity.currency:  # amounts of two currencies don't add up
        before = CostStatus(days=before.days)
    charges = _charges(situation, since, now)
    costs = [each.cost for each in charges]
    return CostStatus(
        total=before.total + sum(each.total for each in costs),
        on_demand_only=before.on_demand_only + sum(each.on_demand_only for each in costs),
        currency=capacity.currency,
        pools=_by_pool(capacity, before.pools, costs),
        days=add_charges(before.days, charges, capacity.currency),
    )


def _charges(situation: Situation, since: datetime, now: datetime) -> list[Charge]:
    """What each node cost that the job's pods hold, by day."""
    capacity = situation.spec.capacity
    on_demand = price(capacity, CapacityType.ON_DEMAND, None) or 0.0
    charges = []
    for facts in _held(situation):
        kind, pool = facts.pod.capacity_type, facts.pod.pool
        own = price(capacity, kind, pool) or 0.0
        for day, seconds in parts_by_day(max(since, facts.pod.placed_at), now):
            hours = seconds / _SECONDS_PER_HOUR
            cost = PoolCost(
                capacity_type=kind,
                pool=pool or "",
                total=hours * own,
                on_demand_only=hours * on_demand,
            )
            charges.append(Charge(day=day, cost=cost))
    return charges


def _by_pool(capacity: Capacity, before: Sequence[PoolCost], charged: Sequence[PoolCost]) -> tuple[PoolCost, ...]:
    """The cost by capacity type and pool.

    Pools that the job no longer has count as one without a name, so that edits don't add up.
    """
    names = {pool.name for pool in capacity.pools}
    known = (each if each.pool in names else each.model_copy(update={"pool": ""}) for each in (*before, *charged))
    return add_pools((), known)


def _held(situation: Situation) -> list[PodFacts]:
    """The pods whose nodes cost money.

    They do also while the image is pulled, and until the pod is gone.
    """
    return [f for f in situation.pods.values() if f.pod.node is not None and not f.ended and not f.unreachable]
