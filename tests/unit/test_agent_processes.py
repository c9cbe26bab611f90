"""Whose end the reaper tells."""

from __future__ import annotations

import os
import time

import pytest

from spottrain_agent.processes import Reaper


def end_a_child(exit_code: int) -> int:
    """Fork a process that ends; its number, once it has."""
    pid = os.fork()
    if pid == 0:
        os._exit(exit_code)
    os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT)
    return pid


async def test_an_end_is_told_to_who_asks_later() -> None:
    reaper = Reaper()
    pid = end_a_child(3)
    reaper.reap()
    assert await reaper.ended(pid) == 3


async def test_an_end_of_long_ago_was_that_of_another_process_of_this_number(monkeypatch: pytest.MonkeyPatch) -> None:
    reaper = Reaper()
    pid = end_a_child(3)
    reaper.reap()
    later = time.monotonic() + 60.0
    monkeypatch.setattr(time, "monotonic", lambda: later)
    assert not reaper.ended(pid).done()
