"""What the job's nodes cost."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime

from spottrain_api.contract.assignments import CapacityType
from spottrain_api.cost_record import add_causes, add_pools
from spottrain_api.list_prices import LIST_CURRENCY, list_price
from spottrain_api.v1alpha1.capacity import Capacity, Pool, PoolType
from spottrain_api.v1alpha1.spending import CostStatus, PoolCost
from spottrain_operator.core.facts.cost_causes import cause_of, stand_ins
from spottrain_operator.core.facts.daily_costs import Charge, add_charges, list_prices_of, parts_by_day
from spottrain_operator.core.facts.situation import Situation
from spottrain_operator.core.model import HeldNode

# Without prices, spot nodes are taken to cost this share of on-demand nodes.
USUAL_RATIO = 0.5
_SECONDS_PER_HOUR = 3600.0


def has_price(capacity: Capacity) -> bool:
    """Whether any cost can be counted."""
    general = (capacity.on_demand.price_per_hour, capacity.spot.price_per_hour)
    bought = (p.price_per_hour for p in capacity.pools if p.capacity_type is not PoolType.RESERVED)
    return any(each is not None for each in (*general, *bought))


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


@dataclass(frozen=True, slots=True, kw_only=True)
class NodePrice:
    """Prices of a node per hour.

    Attributes:
        own: Its price.
        on_demand: That of an on-demand node in its place.
        listed: Whether they are list prices.
    """

    own: float
    on_demand: float
    listed: bool = False


def node_price(capacity: Capacity, held: HeldNode) -> NodePrice | None:
    """What a node costs; at list prices, if the job gives none at all.

    None: unknown.
    """
    kind, pool = held.pod.capacity_type, held.pod.pool
    if has_price(capacity):
        on_demand = price(capacity, CapacityType.ON_DEMAND, None) or 0.0
        return NodePrice(own=price(capacity, kind, pool) or 0.0, on_demand=on_demand)
    if held.node is None or capacity.currency != LIST_CURRENCY:
        return None
    listed = list_price(held.node.labels)
    if listed is None:
        return None
    own = price(capacity, kind, pool)  # a reserved node is paid already
    if own is None:
        own = listed.spot if kind is CapacityType.SPOT else listed.on_demand
    return NodePrice(own=own, on_demand=listed.on_demand, listed=True)


def accounting_time(situation: Situation) -> tuple[datetime, datetime]:
    """From when to when nodes are yet to be charged.

    An operator with another clock has charged up to its own time.
    """
    since = situation.observed.job.status.accounted_at or situation.now
    return since, max(situation.now, since)


def cost_now(situation: Situation) -> CostStatus | None:
    """What the job has cost up to now; None if no price is known.

    It is what the status recorded, and the nodes that the job's pods hold or held since then.
    """
    return situation.once("cost", lambda: _cost_now(situation))


def rate(situation: Situation) -> float:
    """Money per second that the nodes cost which the job holds now."""
    prices = (node_price(situation.spec.capacity, each) for each in situation.held)
    return sum(each.own for each in prices if each is not None) / _SECONDS_PER_HOUR


def _cost_now(situation: Situation) -> CostStatus | None:
    capacity, recorded = situation.spec.capacity, situation.observed.job.status
    since, now = accounting_time(situation)
    charges = _charges(situation, since, now)
    if not charges and not has_price(capacity):
        return recorded.cost
    before = recorded.cost or CostStatus(currency=capacity.currency)
    if before.currency != capacity.currency:  # amounts of two currencies don't add up
        before = CostStatus(days=before.days)
    costs = [each.cost for each in charges]
    return CostStatus(
        total=before.total + sum(each.total for each in costs),
        on_demand_only=before.on_demand_only + sum(each.on_demand_only for each in costs),
        currency=capacity.currency,
        pools=_by_pool(capacity, before.pools, costs),
        causes=add_causes(before.causes, (part for each in charges for part in each.causes)),
        days=add_charges(before.days, charges, capacity.currency),
        list_prices_of=list_prices_of(before.list_prices_of, charges),
    )


def _charges(situation: Situation, since: datetime, now: datetime) -> list[Charge]:
    """What each node cost that the job's pods hold, or held up to now, by day."""
    charges, instead = [], stand_ins(situation)
    spot = price(situation.spec.capacity, CapacityType.SPOT, None)
    for held in (*situation.held, *situation.given_back):
        paid = node_price(situation.spec.capacity, held)
        if paid is None:
            continue
        extra = max(0.0, paid.own - spot) if spot is not None and held.pod.uid in instead else 0.0
        for day, seconds in parts_by_day(max(since, held.pod.placed_at), now):
            hours = seconds / _SECONDS_PER_HOUR
            cost = PoolCost(
                capacity_type=held.pod.capacity_type,
                pool=held.pod.pool or "",
                total=hours * paid.own,
                on_demand_only=hours * paid.on_demand,
            )
            cause = cause_of(situation, held.pod.uid)
            charges.append(Charge(day=day, cost=cost, cause=cause, extra=hours * extra, at_list_price=paid.listed))
    return charges


def _by_pool(capacity: Capacity, before: Sequence[PoolCost], charged: Sequence[PoolCost]) -> tuple[PoolCost, ...]:
    """The cost by capacity type and pool.

    Pools that the job no longer has count as one without a name, so that edits don't add up.
    """
    names = {pool.name for pool in capacity.pools}
    known = (each if each.pool in names else each.model_copy(update={"pool": ""}) for each in (*before, *charged))
    return add_pools((), known)
