"""Memory of this machine, or of the container that this process runs in."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True, slots=True, kw_only=True)
class _Controller:
    """The files of a version of Linux's memory controller, and what it calls pages of files that can be dropped."""

    folder: str
    limit: str
    usage: str
    droppable: tuple[str, ...]


_CONTROLLERS = (
    _Controller(
        folder="sys/fs/cgroup", limit="memory.max", usage="memory.current", droppable=("active_file", "inactive_file")
    ),
    _Controller(
        folder="sys/fs/cgroup/memory",
        limit="memory.limit_in_bytes",
        usage="memory.usage_in_bytes",
        droppable=("total_active_file", "total_inactive_file"),
    ),
)


def total_bytes(root: Path = Path("/")) -> int:
    """Memory of this machine, or of the container if its limit is lower."""
    limits = [limit for each in _CONTROLLERS if (limit := _limit(root, each)) is not None]
    return min([os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"), *limits])


def free_bytes(root: Path = Path("/")) -> int:
    """What processes here can still take before one of them is killed. Pages of files that can be dropped count."""
    free = [1024 * _numbers(root / "proc/meminfo")["MemAvailable:"]]
    for each in _CONTROLLERS:
        if (limit := _limit(root, each)) is not None:
            folder = root / each.folder
            statistics = _numbers(folder / "memory.stat")
            taken = int((folder / each.usage).read_text()) - sum(statistics.get(name, 0) for name in each.droppable)
            free.append(limit - taken)
    return max(0, min(free))


def _limit(root: Path, controller: _Controller) -> int | None:
    """A container's limit, in bytes. None: it has none."""
    path = root / controller.folder / controller.limit
    text = path.read_text().strip() if path.exists() else "max"
    return int(text) if text != "max" else None


def _numbers(path: Path) -> Mapping[str, int]:
    """The numbers of a file with a name and a number on each line."""
    lines = (line.split() for line in path.read_text().splitlines())
    return {words[0]: int(words[1]) for words in lines if len(words) > 1}
