"""`spottrain cost`: what jobs cost, also those that are over or deleted."""

from __future__ import annotations

import json
import re
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from datetime import UTC, date, datetime, timedelta
from typing import Any

from rich.console import Group as Lines
from rich.console import RenderableType
from rich.table import Table
from rich.text import Text

from spottrain_api.cost_record import DAYS_KEPT, CostRecord, all_causes, merge_days
from spottrain_api.v1alpha1.spending import DayCost
from spottrain_cli.api_access import UserError
from spottrain_cli.job_view import JobSnapshot
from spottrain_runtime.wording import listed

KEYS = ("namespace", "job", "day", "type", "pool")
# What only rows without a type and a pool can be of, as causes are recorded for all nodes of a job and day.
CAUSE = "cause"
HEADINGS = {
    "cause": "Cause",
    "namespace": "Namespace",
    "job": "Job",
    "day": "Day",
    "type": "Capacity type",
    "pool": "Pool",
}
_DAYS = re.compile(r"([1-9][0-9]*)d")


@dataclass(frozen=True, slots=True, kw_only=True)
class Spent:
    """Money that nodes of one job, day, capacity type and pool have cost, or those of one job and day for one cause.

    Attributes:
        cause: Empty in a row of a type and pool.
        pool: Empty if the job has no pools.
        on_demand_only: What as many on-demand nodes would have cost; 0 if their price isn't known.
        list_prices_of: Date of the list prices in it. None: its prices are the job's own.
    """

    namespace: str
    job: str
    uid: str
    day: date
    type: str = ""
    pool: str = ""
    cause: str = ""
    currency: str
    cost: float
    on_demand_only: float
    list_prices_of: date | None

    def key(self, names: Sequence[str]) -> tuple[str, ...]:
        return tuple(str(getattr(self, name)) for name in names)


@dataclass(frozen=True, slots=True, kw_only=True)
class Sum:
    """The sum of what has the same key and currency."""

    key: tuple[str, ...]
    currency: str
    cost: float
    on_demand_only: float
    list_prices_of: tuple[date, ...]

    @property
    def saved(self) -> str:
        if self.on_demand_only <= 0:
            return "–"
        return f"{1 - self.cost / self.on_demand_only:.0%}"


def first_day(since: str, today: date) -> date:
    """The first of the last days, today included, or a date.

    Raises:
        UserError: It is neither, or before what is kept.
    """
    days = _DAYS.fullmatch(since)
    try:
        # A number of a hundred digits is no number of days that a date can go back.
        first = today - timedelta(days=int(days[1]) - 1) if days else date.fromisoformat(since)
    except (ValueError, OverflowError):
        raise UserError(
            f"--since {since}: give a number of days, as in 7d, or a date, as in {today.isoformat()}."
        ) from None
    if first > today:
        raise UserError(f"--since {since}: that day is yet to come. Today is {today.isoformat()} (UTC).")
    if (today - first).days >= DAYS_KEPT:
        raise UserError(f"--since {since}: costs are kept for {DAYS_KEPT} days. Ask for {DAYS_KEPT}d at most.")
    return first


def spent(
    records: Iterable[tuple[str, CostRecord]], jobs: Iterable[JobSnapshot], first: date, by: Sequence[str] = ()
) -> list[Spent]:
    """What jobs cost since a day, by capacity type and pool, or by cause if that is asked for.

    The status of a job that exists is newer than its record.

    Raises:
        UserError: By cause and by type or pool: what one pool's nodes cost for a cause is not recorded.
    """
    if CAUSE in by and {"type", "pool"}.intersection(by):
        raise UserError(
            "--by cause: causes are recorded by job and day, not by type and pool. Ask for these on their own."
        )
    names: dict[tuple[str, str], str] = {}
    days: dict[tuple[str, str], tuple[DayCost, ...]] = {}
    for namespace, record in records:
        names[namespace, record.uid], days[namespace, record.uid] = record.job, record.days
    for job in jobs:
        cost, key = job.status.cost, (job.namespace, job.uid)
        if cost is not None:
            names[key], days[key] = job.name, merge_days(days.get(key, ()), cost.days)
    return [
        Spent(
            namespace=key[0],
            job=names[key],
            uid=key[1],
            day=each.day,
            currency=each.currency,
            list_prices_of=each.list_prices_of,
            **part,
        )
        for key in sorted(names, key=lambda key: (key[0], names[key], key[1]))
        for each in days[key]
        if each.day >= first
        for part in (_by_cause(each) if CAUSE in by else _by_pool(each))
    ]


def _by_pool(day: DayCost) -> Iterator[dict[str, Any]]:
    for each in day.pools:
        amounts = {"cost": each.total, "on_demand_only": each.on_demand_only}
        yield {"type": each.capacity_type, "pool": each.pool} | amounts


def _by_cause(day: DayCost) -> Iterator[dict[str, Any]]:
    for each in all_causes(day.causes, day.pools):
        yield {"cause": each.cause, "cost": each.total, "on_demand_only": each.on_demand_only}


def sums(costs: Iterable[Spent], by: Sequence[str]) -> list[Sum]:
    """The sums of the costs with the same key, in order of it."""
    parts: defaultdict[tuple[tuple[str, ...], str], list[Spent]] = defaultdict(list)
    for each in costs:
        parts[each.key(by), each.currency].append(each)
    return [
        Sum(
            key=key,
            currency=currency,
            cost=sum(each.cost for each in equal),
            on_demand_only=sum(each.on_demand_only for each in equal),
            list_prices_of=tuple(sorted({each.list_prices_of for each in equal if each.list_prices_of is not None})),
        )
        for (key, currency), equal in sorted(parts.items())
    ]


def cost_table(costs: Sequence[Spent], by: Sequence[str], first: date) -> RenderableType:
    """One row for each key, and the total of each currency."""
    if not costs:
        return (
            f"No job has cost anything since {first.isoformat()} (UTC). Only nodes whose price is known count: "
            "give capacity.onDemand.pricePerHour and capacity.spot.pricePerHour, or those of pools."
        )
    table = Table(box=None)
    for name in by:
        table.add_column(HEADINGS[name])
    for heading in ("Cost", "On-demand alone", "Saved"):
        table.add_column(heading, justify="right")
    for row in sums(costs, by):
        table.add_row(*row.key, *_amounts(row))
    totals = sums(costs, ())
    table.add_section()
    for row in totals:
        table.add_row(*_total_of(by, first), *_amounts(row))
    dates = sorted({each for row in totals for each in row.list_prices_of})
    return Lines(table, Text(list_price_remark(dates), "yellow")) if dates else table


def list_price_remark(dates: Sequence[date]) -> str:
    """What amounts with an asterisk are."""
    return (
        f"* contains list prices of {listed([each.isoformat() for each in dates])}, each of one region, as the job "
        "gives no prices. A bill differs: set pricePerHour in capacity.onDemand and capacity.spot of the job."
    )


def _total_of(by: Sequence[str], first: date) -> Iterator[str]:
    yield f"Since {first.isoformat()}"
    yield from [""] * (len(by) - 1)


def _amounts(row: Sum) -> tuple[str, str, str]:
    alone = f"{row.on_demand_only:.2f} {row.currency}" if row.on_demand_only > 0 else "–"
    mark = "*" if row.list_prices_of else ""
    return f"{row.cost:.2f} {row.currency}{mark}", alone, row.saved


def cost_json(costs: Sequence[Spent], by: Sequence[str], first: date) -> str:
    """The same for programs."""
    rows = [dict(zip(by, row.key, strict=True)) | _numbers(row) for row in sums(costs, by)]
    answer = {"since": first.isoformat(), "costs": rows, "totals": [_numbers(row) for row in sums(costs, ())]}
    return json.dumps(answer, indent=2)


def _numbers(row: Sum) -> dict[str, object]:
    alone = row.on_demand_only if row.on_demand_only > 0 else None
    dates = [each.isoformat() for each in row.list_prices_of]
    return {"currency": row.currency, "cost": row.cost, "onDemandOnly": alone, "listPricesOf": dates}


def today() -> date:
    """The current day in UTC, by which costs are kept."""
    return datetime.now(UTC).date()
