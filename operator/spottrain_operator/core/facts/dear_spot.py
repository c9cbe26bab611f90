"""Whether spot nodes are so dear at present that a job with time to lose waits for a lower price."""

from __future__ import annotations

from dataclasses import dataclass

from spottrain_api.contract.assignments import CapacityType
from spottrain_api.contract.conditions import ConditionReason, ConditionType
from spottrain_operator.core.facts.costs import price
from spottrain_operator.core.facts.deadline import Deadline, deadline_of, waits_for_spot
from spottrain_operator.core.facts.situation import Situation

# A job that can lose this share of the time that it still needs pays little more than the usual price.
_PLENTY = 0.25
# The least part of the way from the usual price to that of on-demand nodes that it pays. Prices move a little always.
_LEAST = 0.25
# A job that trains waits only if the price is so many times what it would pay. Otherwise it would stop and go.
_MUCH = 1.15


@dataclass(frozen=True, slots=True, kw_only=True)
class DearSpot:
    """Prices per hour of a spot node.

    Attributes:
        now: The present one, of the cheapest pool.
        usual: What the job has paid so far, in the mean.
    """

    now: float
    usual: float


def dear_spot(situation: Situation) -> DearSpot | None:
    """The prices, if the job waits for a lower one; None if it doesn't.

    The less time it can lose, the more it pays: up to the price of on-demand nodes, with no time left.
    """
    return situation.once("dear spot", lambda: _dear_spot(situation))


def _dear_spot(situation: Situation) -> DearSpot | None:
    deadline = deadline_of(situation)
    if deadline is None or not waits_for_spot(situation):
        return None
    now, on_demand = _spot_price(situation), price(situation.spec.capacity, CapacityType.ON_DEMAND, None)
    usual = _usual_share(situation)
    if now is None or on_demand is None or usual is None:
        return None
    most = on_demand * (usual + max(0.0, 1 - usual) * _haste(deadline))
    if now <= (most if _waits_already(situation) else most * _MUCH):
        return None
    return DearSpot(now=now, usual=on_demand * usual)


def _haste(deadline: Deadline) -> float:
    """From _LEAST, with plenty of time, to 1 with none."""
    spare = deadline.slack / max(1.0, _PLENTY * deadline.needed)
    return max(_LEAST, 1 - spare)


def saves_nothing(situation: Situation) -> bool:
    """Whether spot nodes cost no less than on-demand nodes at present."""
    now, on_demand = _spot_price(situation), price(situation.spec.capacity, CapacityType.ON_DEMAND, None)
    return now is not None and on_demand is not None and now >= on_demand > 0


def _spot_price(situation: Situation) -> float | None:
    """The price of a spot node now, in the cheapest pool that gets pods."""
    capacity = situation.spec.capacity
    names: list[str | None] = [p.name for p in capacity.pools if p.kind is CapacityType.SPOT and p.weight > 0]
    prices = (price(capacity, CapacityType.SPOT, name) for name in names or [None])
    return min((each for each in prices if each is not None), default=None)


def _usual_share(situation: Situation) -> float | None:
    """What the job's spot nodes have cost so far, as a share of on-demand nodes for the same time."""
    cost = situation.observed.job.status.cost
    pools = cost.pools if cost is not None else ()
    spot = [each for each in pools if each.capacity_type == CapacityType.SPOT.value]
    on_demand_only = sum(each.on_demand_only for each in spot)
    return sum(each.total for each in spot) / on_demand_only if on_demand_only > 0 else None


def _waits_already(situation: Situation) -> bool:
    known = situation.observed.job.status.condition(ConditionType.ON_TIME)
    return known is not None and known.reason == ConditionReason.SPOT_IS_DEAR
