"""Starts the ranks of a benchmark."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from contextlib import ExitStack

from benchmarks.ports import free_ports


def run_world(module: Sequence[str], world_size: int, environment: Mapping[str, str] | None = None) -> None:
    """Run `python -m` with the words of `module` as ranks of one node.

    The ranks have torchrun's environment. No process is left, whatever happens.

    Raises:
        SystemExit: A rank failed.
    """
    (port,) = free_ports(1)
    size = str(world_size)
    world = {"WORLD_SIZE": size, "LOCAL_WORLD_SIZE": size, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    with ExitStack() as stack:
        ranks = []
        for rank in range(world_size):
            own = {"RANK": str(rank), "LOCAL_RANK": str(rank)}
            process = subprocess.Popen(
                [sys.executable, "-m", *module], env={**os.environ, **(environment or {}), **world, **own}
            )
            stack.callback(process.wait)
            stack.callback(process.kill)
            ranks.append(process)
        if any(process.wait() for process in ranks):
            raise SystemExit(f"A rank of {' '.join(module[:2])} failed; see above.")
