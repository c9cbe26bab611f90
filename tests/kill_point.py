"""Kills a rank, or its writer process, at an operation on a checkpoint store.

The signal is SIGKILL.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
import sys
import threading
from typing import Any
from urllib.parse import urlsplit

# What Python tells an audit hook of, before it does it (docs.python.org, "Audit events table"): all that changes a
# folder, and each piece of a request, its head and its body apart.
OPERATIONS = {"open", "os.mkdir", "os.rename", "os.remove", "os.rmdir", "os.scandir", "os.listdir", "fcntl.flock"}
OPERATIONS |= {"http.client.connect", "http.client.send"}
# Into an operation: a request was sent, and its answer didn't come.
SECONDS_INTO = 0.002


class KillPoint:
    """A kill at one of the operations on the store `uri`.

    It counts the operations from `arm` on, including those of processes that are forked later. It kills at number
    `kill_at`, or `seconds_into` that operation. It kills the rank and what runs beside it. With `spares_rank`, it
    kills only the process that was about to make the operation.
    """

    def __init__(self, uri: str) -> None:
        where = urlsplit(uri)
        self.place = uri if where.netloc else where.path  # a folder of this machine: what its operations name
        # Shared, and without a lock, as a process that is killed would leave it locked.
        self._operations = multiprocessing.get_context("fork").RawValue("i", 0)
        self._in_writer = multiprocessing.get_context("fork").RawValue("b", 0)
        self.kill_at: int | None = None
        self.seconds_into = 0.0
        self.spares_rank = False
        self._rank: int | None = None
        sys.addaudithook(self._hook)

    @property
    def operations(self) -> int:
        return int(self._operations.value)

    @property
    def in_writer(self) -> bool:
        """Whether it was the process beside the rank that came to the point."""
        return bool(self._in_writer.value)

    def arm(self) -> None:
        """Begin to count; in the process of the rank."""
        self._operations.value = self._in_writer.value = 0
        self._rank = os.getpid()

    def _hook(self, event: str, args: tuple[Any, ...]) -> None:
        if self._rank is None or event not in OPERATIONS:
            return
        if not event.startswith("http.") and event != "fcntl.flock" and not str(args[0]).startswith(self.place):
            return
        number = self._operations.value = self._operations.value + 1
        if number != self.kill_at:
            return
        if self.seconds_into:
            threading.Timer(self.seconds_into, self._kill).start()
        else:
            self._kill()

    def _kill(self) -> None:
        if not self.spares_rank and self._rank is not None:
            os.kill(self._rank, signal.SIGKILL)
        self._in_writer.value = os.getpid() != self._rank
        os.kill(os.getpid(), signal.SIGKILL)
