"""What `make crash-points` tries, and what it takes for wrong."""

from __future__ import annotations

from collections import Counter
from typing import Any

from crash_points.campaign import compared
from crash_points.disturbances import Disturbance, Kind, disturbances
from crash_points.lane import Outcome

STATE = {"phase": "Running", "pods": ["on-demand", "spot"], "created pods": 2}


def outcome(state: dict[str, Any], error: str = "") -> Outcome:
    return Outcome(
        scenario="start",
        disturbance=Disturbance(kind=Kind.KILLED_AFTER, number=1),
        state=state,
        writes=(),
        num_events=0,
        is_hit=True,
        seconds=1.0,
        error=error,
    )


def test_each_write_and_each_event_is_disturbed() -> None:
    found = Counter(each.kind for each in disturbances(num_writes=3, num_events=5))
    of_writes = dict.fromkeys((Kind.KILLED_BEFORE, Kind.KILLED_AFTER, Kind.KILLED_STALE, Kind.THROTTLED), 3)
    assert found == of_writes | {Kind.EVENT_LOST: 5, Kind.EVENTS_LATE: 1}


def test_a_run_that_ends_otherwise_is_wrong() -> None:
    reference = outcome(STATE)
    assert compared(outcome(dict(STATE)), reference).wrong == ()
    assert compared(outcome(STATE | {"created pods": 3}), reference).wrong == ("created pods: 3 instead of 2",)
    assert compared(outcome({}, error="not within 60 s"), reference).wrong == ("not within 60 s",)
