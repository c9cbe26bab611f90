"""The time of worlds that have their own."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta

EPOCH = datetime(2026, 1, 1, tzinfo=UTC)
# Seconds until Kubernetes notices that a machine is gone.
NOT_READY_AFTER = 40.0


def at(seconds: float) -> datetime:
    """The world's time as a date."""
    return EPOCH + timedelta(seconds=seconds)


def seconds_of(moment: datetime) -> float:
    """A date as the world's time."""
    return (moment - EPOCH).total_seconds()
