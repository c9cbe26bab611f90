"""Processes as the agent sees them, and whose end the reaper reports."""

from __future__ import annotations

import asyncio
import os
import resource
import signal
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Callable
from contextlib import ExitStack
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest

from control_api_setup import until
from spottrain_agent import replica_process, zygote_process
from spottrain_agent.processes import Reaper, descendants, is_alive
from spottrain_agent.records import WorkerStarted, worker_started_file
from spottrain_agent.replica_process import ReplicaProcess
from spottrain_agent.run_directory import RunDirectory
from spottrain_agent.zygote_process import ZygoteProcess, spawn_zygote

# The kernel keeps 15 bytes of the name, whose letters take two each.
NAMED_IN_RUSSIAN = """
import asyncio, ctypes, os, signal
from spottrain_agent.processes import catches, is_alive, kill_descendants
from spottrain_runtime.processes import die_with_parent

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


# The first thread ends, as at the end of a killed process with a GPU, and another one stays.
ENDS_BUT_FOR_A_THREAD = """
import ctypes, platform, sys, threading, time
threading.Thread(target=time.sleep, args=(60,)).start()
print("ready", flush=True)
ctypes.CDLL(None).syscall(60 if platform.machine() == "x86_64" else 93, 0)
"""


def end_but_for_a_thread() -> subprocess.Popen[bytes]:
    process = subprocess.Popen([sys.executable, "-c", ENDS_BUT_FOR_A_THREAD], stdout=subprocess.PIPE)
    assert process.stdout is not None
    with process.stdout:
        process.stdout.readline()
    return process


async def test_a_zombie_whose_threads_live_is_alive_until_they_are_killed() -> None:
    process = end_but_for_a_thread()
    status = Path(f"/proc/{process.pid}/status")
    await until(lambda: "Z (zombie)" in status.read_text())
    assert is_alive(process.pid)
    assert process.pid in descendants(os.getpid())
    process.kill()
    await until(lambda: not is_alive(process.pid))
    assert process.pid not in descendants(os.getpid())
    process.wait()


def end_a_child(exit_code: int) -> int:
    """Fork a process that ends; its number, once it has."""
    pid = os.fork()
    if pid == 0:
        os._exit(exit_code)
    os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT)
    return pid


@pytest.fixture
async def attached() -> AsyncIterator[Reaper]:
    loop = asyncio.get_running_loop()
    reaper = Reaper()
    reaper.attach(loop)
    yield reaper
    loop.remove_signal_handler(signal.SIGCHLD)


def zygotes(reaper: Reaper) -> ZygoteProcess:
    return ZygoteProcess(reaper, on_change=lambda: None, spawn=spawn_zygote)


def replicas(reaper: Reaper) -> ReplicaProcess:
    process = ReplicaProcess(reaper, "127.0.0.1")
    process._wanted.set()
    return process


async def test_an_end_is_reported_to_who_asks_later() -> None:
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


@pytest.mark.parametrize("made", [zygotes, replicas])
async def test_a_process_beside_the_ranks_that_can_not_be_started_again_is_tried_later(
    attached: Reaper, monkeypatch: pytest.MonkeyPatch, made: Callable[[Reaper], ZygoteProcess | ReplicaProcess]
) -> None:
    starts = 0

    class Popen(subprocess.Popen[bytes]):
        """Ends at once. The second one can't be forked."""

        def __init__(self, *_: object, **__: Any) -> None:
            nonlocal starts
            starts += 1
            if starts == 2:
                raise BlockingIOError(11, "Resource temporarily unavailable")
            super().__init__(["true"])

    monkeypatch.setattr(subprocess, "Popen", Popen)
    for module in (zygote_process, replica_process):
        monkeypatch.setattr(module, "RESTART_DELAY_SECONDS", 0.0)
    running = asyncio.create_task(made(attached).run())
    await until(lambda: starts >= 3 or running.done())
    monkeypatch.undo()
    assert not running.done()
    running.cancel()


def test_a_process_that_proc_hides_is_not_ours(monkeypatch: pytest.MonkeyPatch) -> None:
    """As with the mount option hidepid=1, and processes of other users."""
    child = subprocess.Popen(["sleep", "60"])
    read_text = Path.read_text

    def read(path: Path, **options: Any) -> str:
        if path == Path("/proc/1/stat"):
            raise PermissionError
        return read_text(path, **options)

    monkeypatch.setattr(Path, "read_text", read)
    assert child.pid in descendants(os.getpid())
    child.kill()
    child.wait()


def test_without_a_free_descriptor_ranks_stay_as_they_are_until_they_can_be_looked_at(tmp_path: Path) -> None:
    folder, pid = RunDirectory(tmp_path, 1), end_a_child(0)
    os.waitpid(pid, 0)
    folder.create({})
    started = WorkerStarted(pid=pid, started_at=datetime(2026, 1, 1, tzinfo=UTC))
    started.write(folder.path / worker_started_file(0))
    with ExitStack() as stack:
        soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        stack.callback(resource.setrlimit, resource.RLIMIT_NOFILE, (soft, hard))
        resource.setrlimit(resource.RLIMIT_NOFILE, (0, hard))
        assert is_alive(pid)
        assert folder.worker_started(0) is None
    assert not is_alive(pid)
    assert folder.worker_started(0) == started


@pytest.mark.parametrize(
    "run",
    [
        "from spottrain_agent.command import main; main()",
        "from spottrain_operator.command import main; main(['--control-url', 'https://a:1'], standalone_mode=False)",
    ],
    ids=["agent", "operator"],
)
def test_agent_and_operator_may_open_as_many_files_as_the_system_allows(run: str, tmp_path: Path) -> None:
    """Both end soon: the agent has no settings here, and the operator no cluster."""
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    lines = (
        "import atexit, resource",
        f"resource.setrlimit(resource.RLIMIT_NOFILE, (256, {hard}))",
        "atexit.register(lambda: print(resource.getrlimit(resource.RLIMIT_NOFILE)))",
        run,
    )
    environment = {"PYTHONPATH": os.pathsep.join(sys.path), "HOME": str(tmp_path)}
    command = [sys.executable, "-c", "\n".join(lines)]
    ended = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert ended.stdout == f"({hard}, {hard})\n"
