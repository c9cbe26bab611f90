"""Benchmarks, each a command of its own: `make bench-…`."""

from __future__ import annotations

import signal
import sys
from pathlib import Path

# What benchmarks share with tests is not installed.
sys.path.append(str(Path(__file__).parents[1] / "tests"))


def clean_up_on_sigterm() -> None:
    """Let SIGTERM end a benchmark as Ctrl-C does.

    Its processes, clusters and folders end with it.
    """
    signal.signal(signal.SIGTERM, lambda number, _: sys.exit(128 + number))
