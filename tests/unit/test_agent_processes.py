"""Processes as the agent sees them, and whose end the reaper tells."""

from __future__ import annotations

import os
import subprocess
import sys
import time

import pytest

from spottrain_agent.processes import Reaper

# The kernel keeps 15 bytes of the name, whose letters take two each.
NAMED_IN_RUSSIAN = """
import asyncio, ctypes, os, signal
from spottrain_agent.processes import catches, is_alive, kill_descendants
from spottrain_api.processes import die_with_parent

named, name = os.pipe()
child = os.fork()
if child == 0:
    signal.signal(signal.SIGINT, signal.default_int_handler)
    die_with_parent()
    ctypes.CDLL(None).prctl(15, "обучение модели".encode(), 0, 0, 0)
    os.write(name, b"1")
    signal.pause()
os.read(named, 1)
assert is_alive(child)
assert catches(child, signal.SIGINT)
asyncio.run(kill_descendants())
assert not is_alive(child)
"""


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


def test_a_process_whose_name_ends_within_a_letter_is_seen_and_killed() -> None:
    subprocess.run([sys.executable, "-c", NAMED_IN_RUSSIAN], check=True)
