"""What a cloud had to offer over time: nodes and their price, pool by pool."""

from __future__ import annotations

import csv
import math
from bisect import bisect_right
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from functools import cached_property
from itertools import pairwise

COLUMNS = ("time", "pool", "nodes", "price")
HOUR = 3600.0
LONGEST_GAP = 24 * HOUR


class TraceError(ValueError):
    """What is wrong with a trace, in a sentence for its user."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Offer:
    """What a pool offers from a time on, until its next offer.

    Attributes:
        time: In seconds from the trace's start.
        nodes: How many nodes one job can have.
        price: Of a node per hour.
    """

    time: float
    nodes: int
    price: float


@dataclass(frozen=True)
class Trace:
    """The offers of each pool, in the order of time.

    Attributes:
        end: When it ends, in seconds. Nobody knows what was offered after it.
    """

    offers: Mapping[str, Sequence[Offer]]
    end: float
    _times: dict[str, list[float]] = field(default_factory=dict, repr=False)

    def at(self, pool: str, time: float) -> Offer:
        """What the pool offers at a time. Its first offer holds before that, too."""
        offers = self.offers[pool]
        times = self._times.setdefault(pool, [each.time for each in offers])
        return offers[max(0, bisect_right(times, time) - 1)]

    @cached_property
    def changes(self) -> list[float]:
        """The times at which something changes."""
        return sorted({each.time for offers in self.offers.values() for each in offers} | {self.end})

    def next_change(self, time: float) -> float:
        """When something changes next; infinity after the trace's end."""
        index = bisect_right(self.changes, time)
        return self.changes[index] if index < len(self.changes) else math.inf

    def slots(self, start: float, end: float) -> Iterator[tuple[float, float]]:
        """The stretches of time in which nothing changes."""
        while start < end:
            until = min(end, self.next_change(start))
            yield start, until
            start = until

    def cost(self, pool: str, start: float, end: float) -> float:
        """What a node of the pool costs from one time to another."""
        return sum(self.at(pool, begin).price * (until - begin) / HOUR for begin, until in self.slots(start, end))


def read_trace(
    lines: Iterable[str], pools: Sequence[str], *, unlimited: Sequence[str] = (), longest_gap: float = LONGEST_GAP
) -> Trace:
    """Read a trace from the lines of a CSV file with the columns time, pool, nodes and price.

    Times are seconds, or dates as in 2026-01-31T12:00:00Z. The trace starts with the earliest.

    Args:
        lines: The file's lines.
        pools: Names that may come in the column pool.
        unlimited: Those of them that the trace may leave out.
        longest_gap: Seconds from one row of a pool to the next that are not yet a hole.

    Raises:
        TraceError: With the line that is wrong, and what to do.
    """
    reader = csv.DictReader(lines)
    if missing := [column for column in COLUMNS if column not in (reader.fieldnames or ())]:
        raise TraceError(f"The first line has no column {missing[0]}. It has to be {','.join(COLUMNS)}")
    rows: dict[str, list[Offer]] = {}
    newest = -math.inf
    for row in reader:
        where = f"Line {reader.line_num}"
        pool = (row["pool"] or "").strip()
        if pool not in pools:
            raise TraceError(
                f"{where}: the job has no pool {pool or 'without a name'}. Its pools: {', '.join(pools)}"
            )
        offer = _offer(row, where)
        if offer.time < newest:
            raise TraceError(f"{where}: its time is before that of the line above. Sort the lines by time")
        newest = offer.time
        rows.setdefault(pool, []).append(offer)
    if not rows:
        raise TraceError("The trace has no rows. Give one for each change of a pool, or for each five minutes")
    return _checked(rows, [pool for pool in pools if pool not in unlimited], longest_gap)


def _checked(rows: Mapping[str, list[Offer]], needed: Sequence[str], longest_gap: float) -> Trace:
    start = min(offers[0].time for offers in rows.values())
    end = max(offers[-1].time for offers in rows.values())
    if absent := [pool for pool in needed if pool not in rows]:
        raise TraceError(f"The trace has no row for the pool {absent[0]}. Add one, with 0 nodes if it had none")
    for pool, offers in rows.items():
        times = [start, *(each.time for each in offers), end]
        gap, since = max((later - earlier, earlier) for earlier, later in pairwise(times))
        if gap > longest_gap:
            raise TraceError(
                f"The trace has a hole: no row for the pool {pool} for {gap / HOUR:.1f} h, from "
                f"{(since - start) / HOUR:.1f} h after its start. Add rows, or allow it with --longest-gap"
            )
        if any(earlier.time == later.time for earlier, later in pairwise(offers)):
            raise TraceError(f"The trace has two rows for the pool {pool} at one time. Remove one")
    if end <= start:
        raise TraceError("All rows have the same time, so that the trace has no length. Add a row with its end")
    moved = {
        pool: [Offer(time=each.time - start, nodes=each.nodes, price=each.price) for each in offers]
        for pool, offers in rows.items()
    }
    return Trace(moved, end - start)


def _offer(row: Mapping[str, str | None], where: str) -> Offer:
    if empty := [column for column in COLUMNS if not (row[column] or "").strip()]:
        raise TraceError(f"{where}: {empty[0]} is empty. Give a value, or remove the line")
    nodes, price = _number(row, "nodes", where), _number(row, "price", where)
    if nodes < 0 or nodes != int(nodes):
        raise TraceError(f"{where}: nodes is {row['nodes']}. Give a whole number of 0 or more")
    if price < 0:
        raise TraceError(f"{where}: price is {row['price']}. Give the price of a node per hour, 0 or more")
    return Offer(time=_time(row["time"] or "", where), nodes=int(nodes), price=price)


def _number(row: Mapping[str, str | None], column: str, where: str) -> float:
    try:
        value = float(row[column] or "")
    except ValueError:
        value = math.nan
    if not math.isfinite(value):
        raise TraceError(f"{where}: {column} is {row[column]}, which is no number")
    return value


def _time(text: str, where: str) -> float:
    try:
        value = float(text)
    except ValueError:
        try:
            moment = datetime.fromisoformat(text.strip())
        except ValueError:
            raise TraceError(f"{where}: time is {text}. Give seconds, or a date as in 2026-01-31T12:00:00Z") from None
        value = (moment if moment.tzinfo else moment.replace(tzinfo=UTC)).timestamp()
    if not math.isfinite(value):
        raise TraceError(f"{where}: time is {text}. Give seconds, or a date as in 2026-01-31T12:00:00Z")
    return value
