"""The operator's clock when the wall clock is set."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta

import pytest

from spottrain_operator.clock import SteadyClock

START = datetime(2026, 1, 1, tzinfo=UTC)


class Clocks:
    """A wall clock that can be set, and one that can't."""

    passed = 0.0
    offset = timedelta()

    def wall(self) -> datetime:
        return START + self.offset + timedelta(seconds=self.passed)

    def monotonic(self) -> float:
        return self.passed


def test_it_is_the_wall_clock_while_nobody_sets_that() -> None:
    clocks = Clocks()
    now = SteadyClock(wall=clocks.wall, monotonic=clocks.monotonic)
    for clocks.passed in (0.0, 0.5, 3600.0, 1e6):
        assert now() == clocks.wall()


@pytest.mark.parametrize("jump", [timedelta(hours=3), timedelta(hours=-3)], ids=["forward", "back"])
def test_a_jump_is_followed_slowly_and_never_backwards(jump: timedelta) -> None:
    clocks = Clocks()
    now = SteadyClock(wall=clocks.wall, monotonic=clocks.monotonic)
    clocks.passed, clocks.offset = 10.0, jump
    assert abs(now() - START - timedelta(seconds=10)) <= timedelta(seconds=1)
    before = now()
    while now() != clocks.wall():
        clocks.passed += 60.0
        assert timedelta(seconds=53) < now() - before < timedelta(seconds=67)
        before = now()
    assert timedelta(hours=29) < timedelta(seconds=clocks.passed) < timedelta(hours=31)


@pytest.mark.parametrize("jump", [timedelta(hours=3), timedelta(hours=-3)], ids=["forward", "back"])
def test_a_clock_that_is_set_has_the_time_of_the_wall_clock(jump: timedelta) -> None:
    clocks = Clocks()
    now = SteadyClock(wall=clocks.wall, monotonic=clocks.monotonic)
    clocks.offset = jump
    assert now.off == now.set() == jump
    for clocks.passed in (0.0, 0.5, 3600.0):
        assert now() == clocks.wall()
    assert now.off == timedelta()
