"""Stacks of ranks that hang.

A rank writes its own on a signal of the agent, also while it waits in native code. So do the processes that it forks.
"""

from __future__ import annotations

import asyncio
import faulthandler
import signal
import time
from collections.abc import AsyncIterator
from pathlib import Path

from spottrain_agent.processes import catches, descendants, send_signal

# Scripts and frameworks use SIGUSR1 and SIGUSR2 for their own ends. glibc takes the first real-time signals.
STACK_SIGNAL = signal.SIGRTMAX - 2
_QUIET_SECONDS = 0.3
_MAX_SECONDS = 2.0
_LOOK_SECONDS = 0.05
# Of one rank. The generation is stopped after them.
_MAX_FORKS = 4


def stack_file(local_rank: int) -> str:
    return f"stack-{local_rank}.txt"


def write_stacks_on_signal(path: Path) -> None:
    """Make this process write its stacks to `path` on STACK_SIGNAL. They are the stacks of all its Python threads."""
    faulthandler.register(STACK_SIGNAL, file=path.open("wb"), all_threads=True)  # it keeps the file open


async def written(path: Path, after: int = 0) -> str:
    """What a rank has written to `path` after so many bytes, once it writes no more. Empty if it writes nothing."""
    size, changed_at = after, time.monotonic()
    give_up_at = changed_at + _MAX_SECONDS
    while time.monotonic() < give_up_at and (size == after or time.monotonic() - changed_at < _QUIET_SECONDS):
        await asyncio.sleep(_LOOK_SECONDS)
        if path.stat().st_size != size:
            size, changed_at = path.stat().st_size, time.monotonic()
    return path.read_bytes()[after:].decode(errors="replace").strip()


async def stacks_of_forks(pid: int, path: Path) -> AsyncIterator[tuple[int, str]]:
    """The stacks of the processes that a rank has forked, such as its data workers.

    They write to the rank's own file. A process that the signal would end is left out.

    Args:
        pid: The rank's process.
        path: Its file, to which it writes no more.

    Yields:
        A process and its stacks.
    """
    forks = [child for child in descendants(pid) if catches(child, STACK_SIGNAL)]
    for child in forks[:_MAX_FORKS]:
        after = path.stat().st_size
        send_signal(child, STACK_SIGNAL)
        yield child, await written(path, after)


def script_first(stacks: str, caller: str) -> str:
    """The stacks with the script's thread first. They come without the frames from which `caller` runs the script.

    faulthandler writes the newest thread first: helpers of torch, data loaders and checkpoints before the script.

    Args:
        stacks: As faulthandler writes them, the innermost frame first and a blank line between threads.
        caller: Path of the source file.
    """
    runs_script = f'File "{caller}"'
    threads = sorted(stacks.split("\n\n"), key=lambda thread: runs_script not in thread)
    return "\n\n".join(_from_script(thread.splitlines(), runs_script) for thread in threads)


def _from_script(lines: list[str], caller: str) -> str:
    end = next((number for number, line in enumerate(lines) if caller in line), len(lines))
    while end < len(lines) and '"<frozen runpy>"' in lines[end - 1]:
        end -= 1
    return "\n".join(lines[:end])
