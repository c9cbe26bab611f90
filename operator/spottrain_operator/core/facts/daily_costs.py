"""What nodes cost on each day."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from datetime import UTC, date, datetime, timedelta

from spottrain_api.cost_record import add_pools, merge_days
from spottrain_api.v1alpha1.status import DayCost, PoolCost

# An operator whose records of days can't be written for so long loses those before.
DAYS_IN_STATUS = 7


@dataclass(frozen=True, slots=True, kw_only=True)
class Charge:
    """Money for one node on one day."""

    day: date
    cost: PoolCost


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
    known = {each.day: each.pools for each in before if each.currency == currency}
    charged = [
        DayCost(
            day=day,
            currency=currency,
            pools=add_pools(known.get(day, ()), (each.cost for each in charges if each.day == day)),
        )
        for day in sorted({each.day for each in charges})
    ]
    return merge_days(before, charged, keep=DAYS_IN_STATUS)
