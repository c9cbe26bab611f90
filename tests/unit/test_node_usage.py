"""Processor time and memory of process trees."""

import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager

from spottrain_local.node.usage import Usage, usage_below, usage_of_tree

BURN = "import time\nend = time.process_time() + 0.3\nwhile time.process_time() < end: pass\n"
PARENT = f"""
import subprocess, sys
subprocess.run([sys.executable, "-c", {BURN!r}])
child = subprocess.Popen([sys.executable, "-c", "kept = b'x' * 50_000_000; print('ready', flush=True); input()"])
input()
child.kill()
"""


@contextmanager
def parent() -> Iterator[int]:
    """A process with two children.

    One child has ended after 0.3 s of processor time. The other one has 50 MB.
    """
    pipe = subprocess.PIPE
    with subprocess.Popen([sys.executable, "-c", PARENT], stdin=pipe, stdout=pipe) as process:
        assert process.stdout
        assert process.stdout.readline() == b"ready\n"
        yield process.pid
        process.kill()


def test_children_that_have_ended_count_for_the_time_and_not_for_the_memory() -> None:
    with parent() as pid:
        tree, below = usage_of_tree(pid), usage_below(pid)
        assert 0.3 <= below.cpu_seconds <= tree.cpu_seconds
        assert 45_000_000 < below.memory_bytes < tree.memory_bytes < 150_000_000
        assert usage_below(os.getpid(), ended=False).cpu_seconds >= tree.cpu_seconds


def test_a_process_that_has_ended_uses_nothing() -> None:
    process = subprocess.Popen([sys.executable, "-c", ""])
    process.wait()
    assert usage_of_tree(process.pid) == Usage()


def test_what_a_child_shares_counts_once() -> None:
    script = "import os\nkept = b'x' * 20_000_000\nos.fork() and print('ready', flush=True)\nos.read(0, 1)"
    pipe = subprocess.PIPE
    with subprocess.Popen([sys.executable, "-c", script], stdin=pipe, stdout=pipe) as process:
        assert process.stdout
        assert process.stdout.readline() == b"ready\n"
        assert 20_000_000 <= usage_of_tree(process.pid).memory_bytes < 38_000_000
        process.communicate()
