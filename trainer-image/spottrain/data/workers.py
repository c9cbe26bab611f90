"""Worker processes that fetch data ahead.

The module has what a worker does at its start, and how a rank reads from it.
"""

from __future__ import annotations

import fcntl
import os
import signal
import stat
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from spottrain.checkpoint.errors import CheckpointError
from spottrain.data.hand_over import unpacked
from spottrain_runtime.processes import die_with_parent


class FromWorkers(Iterator[Any]):
    """What workers fetch.

    A worker that hangs never delivers its first item. If `waits_after_first`, a time-out counts for the first item
    alone.
    """

    def __init__(self, fetched: Iterator[Any], *, waits_after_first: bool) -> None:
        self._fetched = fetched
        self._waits_after_first = waits_after_first
        self._has_begun = False

    def __next__(self) -> Any:
        while True:
            try:
                batch = next(self._fetched)
            except CheckpointError as error:
                raise type(error)(_sentence(error)) from None  # of a shard: the worker's traceback says no more
            except (ConnectionError, EOFError, FileNotFoundError) as error:
                if str(error).startswith("Caught "):  # by a worker, from the data set
                    raise
                # A worker has died while it passed a batch. At the next call, torch says so.
            except RuntimeError as error:
                if not (self._waits_after_first and self._has_begun and "DataLoader timed out" in str(error)):
                    raise
            else:
                self._has_begun = True
                return unpacked(batch)


def _sentence(error: CheckpointError) -> str:
    """What an error says, without the traceback that torch adds to it."""
    text = str(error).strip()
    return text.rpartition("\n")[2].partition(": ")[2] if text.startswith("Caught ") else text


@dataclass(frozen=True, slots=True)
class StartWorker:
    """What a worker does first.

    It ends with its rank, because it holds the rank's sockets: peers would not see the rank's end before the
    worker's. It leaves the rank's process group, because torchrun sends SIGTERM to the whole group, which asks the
    rank to drain. It restores the default action of SIGTERM, by which torch stops a worker that takes too long.
    """

    init: Callable[[int], Any] | None

    def __call__(self, number: int) -> None:
        die_with_parent()
        os.setpgid(0, 0)
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        _reopen_files()
        if self.init is not None:
            self.init(number)


def _reopen_files() -> None:
    """Reopen the files that are open for reading, at the same offset.

    A fork shares the offset with the rank, whose script may read the same files, as in an evaluation: each would move
    the other's offset.
    """
    for number in map(int, os.listdir("/proc/self/fd")):
        try:
            is_read = fcntl.fcntl(number, fcntl.F_GETFL) & os.O_ACCMODE == os.O_RDONLY
            if not is_read or not stat.S_ISREG(os.fstat(number).st_mode):
                continue
            place = os.lseek(number, 0, os.SEEK_CUR)
            own = os.open(f"/proc/self/fd/{number}", os.O_RDONLY)
        except OSError:  # the descriptor of the listing itself, and files that are gone
            continue
        os.lseek(own, place, os.SEEK_SET)
        os.dup2(own, number, inheritable=os.get_inheritable(number))
        os.close(own)
