"""Processes of this machine that a test has marked, also those in containers."""

from __future__ import annotations

import contextlib
from pathlib import Path

MARK = "SPOTTRAIN_TEST_MARK"


def marked(mark: str) -> list[int]:
    """Ids of the processes with `mark` as the value of MARK in their environment."""
    found = []
    for entry in Path("/proc").iterdir():
        with contextlib.suppress(OSError):
            if entry.name.isdigit() and f"{MARK}={mark}".encode() in (entry / "environ").read_bytes().split(b"\0"):
                found.append(int(entry.name))
    return found
