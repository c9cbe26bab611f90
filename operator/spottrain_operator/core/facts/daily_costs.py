"""What nodes cost on each day."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from datetime import UTC, date, datetime, timedelta

from spottrain_api.cost_record import add_causes, add_pools, merge_days
from spottrain_api.list_prices import LIST_PRICES_OF
from spottrain_api.v1alpha1.spending import CauseCost, CostCause, DayCost, PoolCost

# An operator whose records of days can't be written for so long loses those before.
DAYS_IN_STATUS = 7


@dataclass(frozen=True, slots=True, kw_only=True)
class Charge:
    """Money for one node on one day.

    Attributes:
        cause: What the node did.
        extra: The part of it that a spot node in the node's place would not have cost.
        at_list_price: Whether the job gives no prices, so that it is at the list price.
    """

    day: date
    cost: PoolCost
    cause: CostCause = CostCause.TRAINING
    extra: float = 0.0
    at_list_price: bool = False

    @property
    def causes(self) -> Iterator[CauseCost]:
        """The same by cause."""
        alone = self.cost.on_demand_only
        yield CauseCost(cause=self.cause.value, total=self.cost.total - self.extra, on_demand_only=alone)
        if self.extra:
            yield CauseCost(cause=CostCause.FALLBACK.value, total=self.extra)


def parts_by_day(since: datetime, until: datetime) -> Iterator[tuple[date, float]]:
    """The days between two times, in UTC, each with its seconds."""
    start, end = since.astimezone(UTC), until.astimezone(UTC)
    while start < end:
        midnight = start.replace(hour=0, minute=0, second=0, microsecond=0) + timedelta(days=1)
        stop = min(midnight, end)
        yield start.date(), (stop - start).total_seconds()
        start = stop


def add_charges(before: Sequence[DayCost], charges: Sequence[Charge], currency: str) -> tuple[DayCost, ...]:
    """The newest days with what was charged since."""
    known = {each.day: each for each in before if each.currency == currency}
    days = sorted({each.day for each in charges})
    charged = [
        _charged(known.get(day, DayCost(day=day, currency=currency)), [each for each in charges if each.day == day])
        for day in days
    ]
    return merge_days(before, charged, keep=DAYS_IN_STATUS)


def list_prices_of(before: date | None, charges: Iterable[Charge]) -> date | None:
    """The date of the list prices in a cost to which something was charged."""
    return LIST_PRICES_OF if any(each.at_list_price for each in charges) else before


def _charged(day: DayCost, charges: Sequence[Charge]) -> DayCost:
    pools = add_pools(day.pools, (each.cost for each in charges))
    causes = add_causes(day.causes, (part for each in charges for part in each.causes))
    listed = list_prices_of(day.list_prices_of, charges)
    return day.model_copy(update={"pools": pools, "causes": causes, "list_prices_of": listed})
