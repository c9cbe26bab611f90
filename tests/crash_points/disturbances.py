"""What can be done to an operator.

Kills, lost events, late events, stale lists, refusals for now.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from enum import StrEnum


class Kind(StrEnum):
    """What happens to the operator.

    - KILLED_BEFORE: it is killed before a write reaches the API server.
    - KILLED_AFTER: it is killed after the write, before the answer reaches it.
    - KILLED_STALE: as KILLED_AFTER, and what the next operator is shown is old: its first lists are from before the
      scenario, and the events since then come late.
    - EVENT_LOST: the connection of a watch breaks before an event arrives.
    - EVENTS_LATE: all events come late.
    - THROTTLED: from a write on, the API server answers 429 for a while.
    """

    UNDISTURBED = "undisturbed"
    KILLED_BEFORE = "killed before"
    KILLED_AFTER = "killed after"
    KILLED_STALE = "killed, stale"
    EVENT_LOST = "event lost"
    EVENTS_LATE = "events late"
    THROTTLED = "throttled"


AT_WRITES = (Kind.KILLED_BEFORE, Kind.KILLED_AFTER, Kind.KILLED_STALE, Kind.THROTTLED)


@dataclass(frozen=True, slots=True, kw_only=True)
class Disturbance:
    """A disturbance.

    `number` says at which write, or event, of the scenario; the first one is 1.
    """

    kind: Kind = Kind.UNDISTURBED
    number: int = 0

    def __str__(self) -> str:
        return f"{self.kind} {self.number}" if self.number else str(self.kind)


def disturbances(num_writes: int, num_events: int) -> Iterator[Disturbance]:
    """All disturbances of a scenario with so many writes and events."""
    for kind in AT_WRITES:
        for number in range(1, num_writes + 1):
            yield Disturbance(kind=kind, number=number)
    for number in range(1, num_events + 1):
        yield Disturbance(kind=Kind.EVENT_LOST, number=number)
    yield Disturbance(kind=Kind.EVENTS_LATE)
