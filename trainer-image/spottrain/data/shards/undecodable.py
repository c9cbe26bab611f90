"""Which samples could not be decoded on a node: a file that its ranks and their workers share."""

from __future__ import annotations

import fcntl
from pathlib import Path

import numpy as np

_RECORD = np.dtype(np.int64)


class Undecodable:
    """Samples that were left out, each once. They are those of an index, so that they stay over restarts."""

    def __init__(self, file: Path) -> None:
        self.file = file

    def __len__(self) -> int:
        return self.file.stat().st_size // _RECORD.itemsize if self.file.exists() else 0

    def add(self, sample: int, most: int) -> int | None:
        """Record a sample.

        Args:
            sample: Its index in the data set.
            most: How many there may be.

        Returns:
            Which one it is, counted from 1; 0 if it is there already, and None if it would be one too many.
        """
        with self.file.open("a+b") as file:
            fcntl.flock(file, fcntl.LOCK_EX)
            file.seek(0)
            known = np.frombuffer(file.read(), _RECORD)
            if sample in known:
                return 0
            if len(known) >= most:
                return None
            file.write(_RECORD.type(sample).tobytes())
            return len(known) + 1


def is_of_the_machine(error: Exception) -> bool:
    """Whether an error says nothing about a sample: memory or a disk fails. Errors of a disk have a number."""
    return isinstance(error, MemoryError) or (isinstance(error, OSError) and error.errno is not None)
