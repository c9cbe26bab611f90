"""Ranks as forked processes, as a pytest plugin.

They are forked from a process that has imported what takes long.
"""

from __future__ import annotations

import multiprocessing
import os
import runpy
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from multiprocessing import forkserver
from multiprocessing.context import ForkServerProcess
from pathlib import Path
from typing import Any

import pytest

from spottrain_agent.ports import ReservedPort

# Of the newest worlds, for rank 0 to listen on: nobody else is given them meanwhile.
_PORTS: deque[ReservedPort] = deque()
_NEWEST = 16


@pytest.fixture(scope="session")
def fork() -> Any:
    """The context of the process that ranks are forked from.

    The agent's ranks are forked from its zygote in the same way.
    """
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["rank_preload"])
    # Python 3.11 doesn't hand sys.path over to that process, and ignores what it can't import there.
    with pytest.MonkeyPatch.context() as environment:
        environment.setenv("DS_ACCELERATOR", "cpu")
        environment.setenv("OMP_NUM_THREADS", "1")
        environment.setenv("OPENBLAS_NUM_THREADS", "1")
        environment.setenv("PYTHONPATH", str(Path(__file__).parent), prepend=os.pathsep)
        forkserver.ensure_running()
    return context


def rank_environments(world_size: int, *, local_world_size: int = 1) -> list[dict[str, str]]:
    """What torchrun tells each rank of a new world, in order of rank."""
    # On all addresses, as torch's store listens on them: elsewhere an agent would get the same port for its own.
    _PORTS.append(ReservedPort("0.0.0.0"))
    if len(_PORTS) > _NEWEST:
        _PORTS.popleft().release()
    return [
        {
            "RANK": str(rank),
            "WORLD_SIZE": str(world_size),
            "LOCAL_RANK": str(rank % local_world_size),
            "LOCAL_WORLD_SIZE": str(local_world_size),
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(_PORTS[-1].number),
        }
        for rank in range(world_size)
    ]


@contextmanager
def forked_ranks(
    fork: Any, script: Path, settings: Sequence[dict[str, Any]], *, seconds: float = 240.0
) -> Iterator[list[ForkServerProcess]]:
    """Run a script as ranks while the block runs, and on to their end.

    Each rank gets its own settings as RANK_SETTINGS. After the block, the ranks have `seconds` to end. Whatever
    happens, none of them is left.
    """
    ranks: list[ForkServerProcess] = [
        fork.Process(
            target=runpy.run_path,
            args=(str(script),),
            kwargs={"init_globals": {"RANK_SETTINGS": each}, "run_name": "__main__"},
        )
        for each in settings
    ]
    try:
        for process in ranks:
            process.start()
        yield ranks
        for process in ranks:
            process.join(seconds)
        assert all(not process.is_alive() for process in ranks), "a rank hangs"
    finally:
        for process in ranks:
            process.kill()
            process.join()
