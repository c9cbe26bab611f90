"""Ends its process by SIGKILL at one of the process's operations on a checkpoint store."""

from __future__ import annotations

import os
import signal
import sys
import threading
from typing import Any

# What Python tells an audit hook of, before it does it (docs.python.org, "Audit events table"): all that changes a
# folder, and each piece of a request, its head and its body apart.
OPERATIONS = {"open", "os.mkdir", "os.rename", "os.remove", "os.rmdir", "os.scandir", "os.listdir", "fcntl.flock"}
OPERATIONS |= {"http.client.connect", "http.client.send"}
# Into an operation: a request was sent, and its answer didn't come.
SECONDS_INTO = 0.002


class KillPoint:
    """Counts the operations on the store `uri` while `armed`, and kills at number `kill_at`, or `seconds_into` it."""

    def __init__(self, uri: str) -> None:
        self.folder = uri.removeprefix("file://")
        self.operations = 0
        self.kill_at: int | None = None
        self.seconds_into = 0.0
        self.armed = False
        sys.addaudithook(self._hook)

    def _hook(self, event: str, args: tuple[Any, ...]) -> None:
        if not self.armed or event not in OPERATIONS:
            return
        if not event.startswith("http.") and event != "fcntl.flock" and not str(args[0]).startswith(self.folder):
            return
        self.operations += 1
        if self.operations != self.kill_at:
            return
        if self.seconds_into:
            threading.Timer(self.seconds_into, os.kill, (os.getpid(), signal.SIGKILL)).start()
        else:
            os.kill(os.getpid(), signal.SIGKILL)
