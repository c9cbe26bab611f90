"""The operator's clock: the time of day without leaps."""

from __future__ import annotations

import time
from collections.abc import Callable
from datetime import UTC, datetime, timedelta

MAX_SLEW = 0.1


class SteadyClock:
    """The time of day, as NTP would slew it.

    If the wall clock is set forward or back, this clock follows by at most a tenth of the time that passes.

    Decisions compare moments. If the clock leapt an hour forward, every agent would seem silent for an hour, and
    every job would seem to hang. Monotonic time is not enough, because a cloud's deadline is a time of day.
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
