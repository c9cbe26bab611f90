"""The operator's clock: the time of day without leaps."""

from __future__ import annotations

import time
from collections.abc import Callable
from datetime import UTC, datetime, timedelta

MAX_SLEW = 0.1
# Slowly, this takes ten minutes. A suspension of the machine for hours would take days.
FAR_OFF = timedelta(minutes=1)


class SteadyClock:
    """The time of day, as NTP would slew it.

    If the wall clock is set forward or back, this clock follows by at most a tenth of the time that passes.

    Decisions compare moments. If the clock leapt an hour forward, every agent would seem silent for an hour, and
    every job would seem to hang. Monotonic time is not enough, because a cloud's deadline is a time of day.

    If the two differ by more than FAR_OFF, the operator sets this clock, and begins anew.
    """

    def __init__(
        self,
        *,
        wall: Callable[[], datetime] = lambda: datetime.now(UTC),
        monotonic: Callable[[], float] = time.monotonic,
    ) -> None:
        self._wall = wall
        self._monotonic = monotonic
        self._now, self._at = wall(), monotonic()

    def __call__(self) -> datetime:
        at = self._monotonic()
        passed = timedelta(seconds=at - self._at)
        behind = self._wall() - (self._now + passed)
        self._now += passed + max(-MAX_SLEW * passed, min(behind, MAX_SLEW * passed))
        self._at = at
        return self._now

    @property
    def off(self) -> timedelta:
        """How far the wall clock is ahead of this one."""
        return self._wall() - self()

    def set(self) -> timedelta:
        """Take over the time of the wall clock, and return how far ahead that was."""
        off = self.off
        self._now += off
        return off
