"""A rank that hangs shows where it stands.

It writes its stack on a signal, and the agent's log shows the script's part.
"""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
from pathlib import Path

from spottrain_agent.stacks import STACK_SIGNAL, script_first, written

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
