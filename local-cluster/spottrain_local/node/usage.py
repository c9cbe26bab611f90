"""Processor time and memory of processes, from /proc."""

import os
from dataclasses import dataclass
from pathlib import Path

from spottrain_local.node.shim import descendants

_TICKS_PER_SECOND = os.sysconf("SC_CLK_TCK")


@dataclass(frozen=True, slots=True)
class Usage:
    """Processor time of processes since they started, and their memory.

    Pages that several processes share count in shares.
    """

    cpu_seconds: float = 0.0
    memory_bytes: int = 0

    def __add__(self, other: "Usage") -> "Usage":
        return Usage(self.cpu_seconds + other.cpu_seconds, self.memory_bytes + other.memory_bytes)


def usage_of_tree(root: int) -> Usage:
    """Return the usage of a process and all below it."""
    return _usage(root) + usage_below(root, ended=False)


def usage_below(root: int, *, ended: bool = True) -> Usage:
    """Return the usage of all processes below `root`.

    With `ended`, it counts the time of the processes that have ended and for which `root` has waited.
    """
    total = Usage(sum(_ticks(root)[2:]) / _TICKS_PER_SECOND if ended else 0.0)
    for pid in descendants(root):
        total += _usage(pid)
    return total


def _usage(pid: int) -> Usage:
    return Usage(sum(_ticks(pid)) / _TICKS_PER_SECOND, _memory(pid))


def _ticks(pid: int) -> tuple[int, ...]:
    """Return a process's user and system time, then those of its ended children."""
    try:
        # The name stands in parentheses, and may itself contain spaces and parentheses.
        fields = Path(f"/proc/{pid}/stat").read_bytes().rpartition(b")")[2].split()
    except OSError:
        return (0, 0, 0, 0)  # It has just ended.
    return tuple(map(int, fields[11:15]))


def _memory(pid: int) -> int:
    try:
        lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
    except OSError:
        return 0
    return next((int(line.split()[1]) * 1024 for line in lines if line.startswith("Pss:")), 0)
