"""Starts the ranks of a benchmark, and finds ports for servers."""

from __future__ import annotations

import itertools
import os
import socket
import subprocess
import sys
from collections.abc import Mapping, Sequence
from contextlib import ExitStack

# The kernel gives these to nobody who asks for any port.
_PORTS = range(10_000, 20_000)
# Neighbouring processes, as the workers of a test run, begin far from each other.
_numbers = itertools.count(997 * os.getpid())


def free_ports(count: int) -> list[int]:
    """Free ports of 127.0.0.1, all different.

    No call names a port again: a server that starts may take seconds until it listens.
    """
    candidates = (_PORTS[number % len(_PORTS)] for number in _numbers)
    return list(itertools.islice(filter(_is_free, candidates), count))


def _is_free(port: int) -> bool:
    try:
        socket.create_server(("127.0.0.1", port)).close()
    except OSError:
        return False
    return True


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
