"""Memory that saves are staged in, as the kernel knows it."""

from __future__ import annotations

import os
from contextlib import suppress
from pathlib import Path


def staging_memory() -> dict[int, int]:
    """Size in bytes of each that this process has, by its inode."""
    found = {}
    for descriptor in Path("/proc/self/fd").iterdir():
        with suppress(FileNotFoundError):  # the listing itself
            if "spottrain-staging" in os.readlink(descriptor):
                status = descriptor.stat()
                found[status.st_ino] = status.st_size
    return found
