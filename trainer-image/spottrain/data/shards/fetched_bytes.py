"""How many bytes of shards a node has fetched: a file of the cache that its processes share."""

from __future__ import annotations

import fcntl
from pathlib import Path
from typing import NamedTuple

import numpy as np


class Fetched(NamedTuple):
    """Bytes of shards: of all that were fetched, and of those for which a rank or a worker has waited."""

    all: int
    late: int


class FetchedBytes:
    """Counts what is fetched into a cache. The counts stay over restarts."""

    def __init__(self, file: Path) -> None:
        self._file = file

    def totals(self) -> Fetched:
        try:
            return _parsed(self._file.read_bytes())
        except FileNotFoundError:
            return Fetched(0, 0)

    def add(self, size: int, *, late: bool) -> None:
        """Count a shard. `late`: something waits for it, as nothing has fetched it ahead."""
        with self._file.open("a+b") as file:
            fcntl.flock(file, fcntl.LOCK_EX)
            file.seek(0)
            known = _parsed(file.read())
            file.truncate(0)
            file.write(np.array([known.all + size, known.late + late * size], np.int64).tobytes())


def _parsed(content: bytes) -> Fetched:
    """What a file says; nothing if another process is writing it."""
    return Fetched(*np.frombuffer(content, np.int64).tolist()) if len(content) == 16 else Fetched(0, 0)
