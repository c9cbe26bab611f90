"""A rank that hangs shows where it stands.

It writes its stack on a signal, and the agent's log shows the script's part.
"""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from cluster_fixtures import wait_for
from spottrain_agent.processes import catches, descendants, is_alive
from spottrain_agent.stacks import STACK_SIGNAL, script_first, stacks_of_forks, written

HANGS = """
import sys, threading
from pathlib import Path
from spottrain_agent.stacks import write_stacks_on_signal

def waits_for_a_lock():
    lock = threading.Lock()
    lock.acquire()
    print("here", flush=True)
    lock.acquire()

write_stacks_on_signal(Path(sys.argv[1]))
waits_for_a_lock()
"""
WRITTEN = """\
Thread 0x1 (most recent call first):
  File "/usr/lib/python3/threading.py", line 359 in wait

Current thread 0x2 (most recent call first):
  File "/app/hang.py", line 56 in main
  File "/app/hang.py", line 60 in <module>
  File "<frozen runpy>", line 88 in _run_code
  File "<frozen runpy>", line 287 in run_path
  File "/lib/spottrain_agent/worker.py", line 131 in _run_as_main
  File "/lib/spottrain_agent/worker.py", line 80 in run_worker"""


def test_a_rank_that_waits_for_ever_writes_where(tmp_path: Path) -> None:
    path = tmp_path / "stack-0.txt"
    with subprocess.Popen([sys.executable, "-c", HANGS, str(path)], stdout=subprocess.PIPE) as rank:
        assert rank.stdout is not None
        assert rank.stdout.readline() == b"here\n"
        os.kill(rank.pid, STACK_SIGNAL)
        stacks = asyncio.run(written(path))
        rank.kill()
    assert "in waits_for_a_lock" in stacks.splitlines()[1]
    assert rank.wait() == -signal.SIGKILL, "the signal doesn't end it"


FORKS = """
import os, sys, time
from pathlib import Path
from spottrain_agent.stacks import write_stacks_on_signal

def fetches_an_item():
    print("here", flush=True)
    time.sleep(1000)

write_stacks_on_signal(Path(sys.argv[1]))
if os.fork() == 0:
    fetches_an_item()
if os.fork() == 0:
    os.execvp("sleep", ["sleep", "1000"])
time.sleep(1000)
"""


@pytest.fixture
def catches_sigint() -> Iterator[None]:
    """A shell that runs the tests in its background lets them ignore it."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.mark.usefixtures("catches_sigint")
def test_what_a_rank_has_forked_writes_where_it_stands_too(tmp_path: Path) -> None:
    """A program that the signal would end is left alone."""
    path = tmp_path / "stack-0.txt"

    async def ask(pid: int) -> list[tuple[int, str]]:
        os.kill(pid, STACK_SIGNAL)
        assert "fetches_an_item" not in await written(path)
        return [found async for found in stacks_of_forks(pid, path)]

    with subprocess.Popen([sys.executable, "-c", FORKS, str(path)], stdout=subprocess.PIPE) as rank:
        try:
            assert rank.stdout is not None
            assert rank.stdout.readline() == b"here\n"
            wait_for(lambda: any(not catches(child, STACK_SIGNAL) for child in descendants(rank.pid)), "it sleeps")
            worker, sleep = sorted(descendants(rank.pid), key=lambda pid: not catches(pid, STACK_SIGNAL))
            [(pid, stacks)] = asyncio.run(ask(rank.pid))
            assert is_alive(sleep)
        finally:
            for child in descendants(rank.pid):
                os.kill(child, signal.SIGKILL)
            rank.kill()
    assert pid == worker
    assert "in fetches_an_item" in stacks.splitlines()[1]
    assert catches(os.getpid(), signal.SIGINT)
    assert not catches(2**22 + 1, signal.SIGINT)


async def test_a_rank_that_writes_nothing_is_not_waited_for_for_ever(tmp_path: Path) -> None:
    (tmp_path / "stack-0.txt").touch()
    assert await written(tmp_path / "stack-0.txt") == ""


def test_the_log_shows_the_script_before_other_threads_and_not_what_runs_it() -> None:
    assert script_first(WRITTEN, "/lib/spottrain_agent/worker.py").splitlines() == [
        "Current thread 0x2 (most recent call first):",
        '  File "/app/hang.py", line 56 in main',
        '  File "/app/hang.py", line 60 in <module>',
        "",
        "Thread 0x1 (most recent call first):",
        '  File "/usr/lib/python3/threading.py", line 359 in wait',
    ]
