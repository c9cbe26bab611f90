"""A process on each node that fetches shards before its ranks need them."""

from __future__ import annotations

import logging
import multiprocessing
import os
import time
from collections.abc import Callable, Iterator
from ctypes import c_longlong

from spottrain.checkpoint.errors import CheckpointError
from spottrain.data.shards.cache import CacheUnusable
from spottrain.data.shards.dataset import Shards
from spottrain.data.shards.shard_order import ShardOrder
from spottrain.data.workers import StartWorker

logger = logging.getLogger(__name__)

Upcoming = Callable[[int], Iterator[int]]

_POLL_SECONDS = 0.1


class FetchAhead:
    """Fetches ahead of a node's ranks. It runs in a process of its own, and ends with the rank that has started it.

    If it ends early, ranks and workers fetch what they need themselves.
    """

    def __init__(self, shards: Shards, upcoming: Upcoming, first_step: int) -> None:
        """Start the process.

        Args:
            shards: The data set.
            upcoming: The shards of which the node needs samples after so many steps, in order of their first use.
            first_step: The first step, counted from 0.
        """
        context = multiprocessing.get_context("fork")
        self._step = context.RawValue("q", first_step)
        self.process = context.Process(
            target=_run, args=(shards, upcoming, self._step), name="fetch-ahead", daemon=True
        )
        self.process.start()

    def at(self, step: int) -> None:
        """Say how many steps are complete."""
        self._step.value = step

    def close(self) -> None:
        """End the process."""
        self.process.kill()
        self.process.join()


def check_room(shards: Shards, order: ShardOrder, share: range) -> None:
    """Raises CacheUnusable if a node's windows don't fit into the cache."""
    needed = order.side_by_side(share) * int(shards.index.unpacked.max())
    needed = min(needed, int(shards.index.unpacked.sum()))
    if needed > shards.cache.max_bytes:
        raise CacheUnusable(
            f"the cache holds {shards.cache.max_bytes} bytes, and this node reads shards of {needed} bytes side by "
            "side; raise cache_bytes to at least that, or lower window or lanes of Shards"
        )


def wanted(shards: Shards, upcoming: Iterator[int]) -> list[int]:
    """The shards that are needed next and fit into the cache together."""
    found: dict[int, None] = {}
    room = shards.cache.max_bytes
    for number in upcoming:
        if number not in found:
            room -= int(shards.index.unpacked[number])
            if room < 0:
                break
            found[number] = None
    return list(found)


def _run(shards: Shards, upcoming: Upcoming, step: c_longlong) -> None:
    StartWorker(None)(0)
    os.nice(5)
    planned, plan, said = -1, list[int](), ""
    while True:
        try:
            if (completed := step.value) != planned:
                plan = wanted(shards, upcoming(completed))
                shards.cache.plan(plan)
                planned = completed
            missing = next((number for number in plan if not shards.cache.holds(number)), None)
            if missing is None:
                time.sleep(_POLL_SECONDS)
                continue
            shards.cache.fetch(missing, ahead=True)
        except (CheckpointError, ValueError) as error:
            if str(error) != said:
                said = str(error)
                logger.warning("A shard could not be fetched ahead: %s", said)
            time.sleep(_POLL_SECONDS * 50)
