"""The operator is killed, or refused for now, at some of its writes.

The API server is a real one. `make crash-points` tries all of them.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from crash_points.campaign import disturbed, lanes, references
from crash_points.disturbances import Disturbance, Kind

pytestmark = pytest.mark.cluster

NUM_LANES = 3
SAMPLE = (
    ("suspension", Disturbance(kind=Kind.KILLED_BEFORE, number=6)),
    ("preemption", Disturbance(kind=Kind.KILLED_AFTER, number=2)),
    ("preemption", Disturbance(kind=Kind.EVENT_LOST, number=4)),
    ("preemption", Disturbance(kind=Kind.THROTTLED, number=1)),
    ("start", Disturbance(kind=Kind.KILLED_STALE, number=3)),
    ("completion", Disturbance(kind=Kind.KILLED_AFTER, number=1)),
    ("deletion", Disturbance(kind=Kind.KILLED_BEFORE, number=2)),
)


async def test_a_disturbed_operator_ends_as_an_undisturbed_one(tmp_path: Path) -> None:
    async with lanes(tmp_path, NUM_LANES) as opened:
        reference = await references(opened, dict.fromkeys(scenario for scenario, _ in SAMPLE), print)
        assert not [outcome for outcome in reference.values() if outcome.error]
        verdicts = await disturbed(opened, SAMPLE, reference, print)
    assert not [str(verdict) for verdict in verdicts if verdict.wrong]
    assert all(verdict.outcome.is_hit for verdict in verdicts)
    for log in tmp_path.glob("lane*/operator.log"):
        assert "no longer leads" not in log.read_text()
