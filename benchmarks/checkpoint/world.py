"""Starts the benchmark's ranks."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from benchmarks.processes import run_world


def run_ranks(
    phase: str, uri: str, *, world_size: int, mib: int, rounds: int, folder: Path, environment: dict[str, str]
) -> dict[str, Any]:
    """Run one phase and return rank 0's report. No process is left, whatever happens."""
    result = folder / f"{phase}.json"
    result.unlink(missing_ok=True)
    module = ["benchmarks.checkpoint.ranks", phase, uri, str(mib), str(rounds), str(result)]
    run_world(module, world_size, environment)
    report: dict[str, Any] = json.loads(result.read_text())
    return report
