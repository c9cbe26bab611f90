"""Processes as PID 1 sees them: reap orphans, and kill everything that is left.

Workers and their children may be in sessions of their own, so that process groups don't help. Descendants are found
by parent in /proc. Linux only.
"""

from __future__ import annotations

import asyncio
import math
import os
import signal
import time
from collections import OrderedDict
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from pathlib import Path

_MAX_UNCLAIMED = 64
_CLAIM_SECONDS = 30.0
# Between two rounds of signals to descendants that are left.
_RETRY_SECONDS = 0.02


@dataclass(frozen=True, slots=True)
class _Stat:
    """What the kernel says of a process.

    Attributes:
        state: Letter of the state of its first thread.
    """

    state: str
    parent: int
    num_threads: int

    @property
    def runs(self) -> bool:
        """Whether any thread does. A zombie's others may, and hold the memory of its GPU until they have ended."""
        return self.state not in "ZX" or self.num_threads > 1


def _stat(pid: int | str) -> _Stat | None:
    """What the kernel says of a process, or None if there is no such process.

    One that /proc hides (mount option hidepid) isn't ours.
    """
    try:
        # The kernel keeps 15 bytes of a name, which may end within a character.
        text = Path(f"/proc/{pid}/stat").read_text(errors="replace")
    except (FileNotFoundError, ProcessLookupError, PermissionError):
        return None
    # The name in parentheses may itself contain spaces and parentheses.
    fields = text.rpartition(")")[2].split()
    return _Stat(fields[0], int(fields[1]), int(fields[17]))


def is_alive(pid: int) -> bool:
    """Whether the process still runs. A zombie without other threads doesn't.

    One that can't be looked at now, as without a free file descriptor, counts as running.
    """
    try:
        stat = _stat(pid)
    except OSError:
        return True
    return stat is not None and stat.runs


def descendants(root: int) -> list[int]:
    """All living processes below `root`, parents before children."""
    children: dict[int, list[int]] = {}
    for name in os.listdir("/proc"):
        stat = _stat(name) if name.isdecimal() else None
        if stat is not None and stat.runs:
            children.setdefault(stat.parent, []).append(int(name))
    return list(_walk(root, children))


def _walk(root: int, children: dict[int, list[int]]) -> Iterator[int]:
    waiting = list(children.get(root, ()))
    while waiting:
        pid = waiting.pop(0)
        yield pid
        waiting.extend(children.get(pid, ()))


def catches(pid: int, number: int) -> bool:
    """Whether the process has a handler for the signal."""
    try:
        text = Path(f"/proc/{pid}/status").read_text(errors="replace")
    except (FileNotFoundError, ProcessLookupError):
        return False
    caught = next((line.split()[1] for line in text.splitlines() if line.startswith("SigCgt:")), "0")
    return bool(int(caught, 16) >> (number - 1) & 1)


def send_signal(pid: int, number: int) -> None:
    """Send a signal. It is fine if the process is gone already."""
    try:
        os.kill(pid, number)
    except ProcessLookupError:
        return


async def kill_descendants(keep: Collection[int] = ()) -> None:
    """Send SIGKILL to every descendant of this process except `keep`.

    It repeats that until none is left, because a process may fork between the look and the kill. It waits as long as
    it takes: a process in uninterruptible sleep can't be killed, and to start its successor beside it would be worse.
    """
    while left := [pid for pid in descendants(os.getpid()) if pid not in keep]:
        for pid in left:
            send_signal(pid, signal.SIGKILL)
        await asyncio.sleep(_RETRY_SECONDS)


class Reaper:
    """Collects every child that ends, including adopted ones.

    It reports the end to those who wait for it. Only this class calls waitpid: a second caller would steal the exit
    statuses.
    """

    def __init__(self) -> None:
        self._waiting: dict[int, asyncio.Future[int]] = {}
        # Children that ended before anyone asked: the message that announces a fork may come later.
        self._unclaimed: OrderedDict[int, tuple[int, float]] = OrderedDict()

    def attach(self, loop: asyncio.AbstractEventLoop) -> None:
        loop.add_signal_handler(signal.SIGCHLD, self.reap)

    def ended(self, pid: int) -> asyncio.Future[int]:
        """A future of the exit code of the child `pid`. A negative one is a signal."""
        future: asyncio.Future[int] = asyncio.get_running_loop().create_future()
        exit_code, ended_at = self._unclaimed.pop(pid, (0, -math.inf))
        # An older entry is of a different process with the same number.
        if time.monotonic() - ended_at < _CLAIM_SECONDS:
            future.set_result(exit_code)
        else:
            self._waiting[pid] = future
        return future

    def reap(self) -> None:
        while True:
            try:
                pid, status = os.waitpid(-1, os.WNOHANG)
            except ChildProcessError:
                return
            if pid == 0:
                return
            self._record(pid, os.waitstatus_to_exitcode(status))

    def _record(self, pid: int, exit_code: int) -> None:
        future = self._waiting.pop(pid, None)
        if future is None:
            self._unclaimed[pid] = exit_code, time.monotonic()
            if len(self._unclaimed) > _MAX_UNCLAIMED:
                self._unclaimed.popitem(last=False)
        elif not future.done():
            future.set_result(exit_code)
