"""Wakes and reconcile passes.

A job has one pass at a time. Many jobs have theirs side by side, up to a limit.

A wake reports that something may have changed, but not what. All wakes during a pass, or while one waits, lead to one
more pass. A failed pass is retried after a growing pause with jitter. Wakes don't shorten that pause.
"""

from __future__ import annotations

import asyncio
import logging
import random
from collections.abc import Awaitable, Callable
from dataclasses import dataclass

from spottrain_api.logs import about
from spottrain_operator.cluster.client import ClusterError, ConflictError, JobKey

logger = logging.getLogger(__name__)

BACKOFF_FIRST_SECONDS = 0.5
BACKOFF_MAX_SECONDS = 30.0
# A lost write race is normal (a user edits while the operator writes): read again soon.
CONFLICT_SECONDS = 0.1


@dataclass(frozen=True, slots=True, kw_only=True)
class PassResult:
    """What a pass leaves to do.

    - requeue_after: seconds until the next pass, even without a wake. None: wait for a wake.
    - gone: the job is deleted, and needs no further pass.
    """

    requeue_after: float | None = None
    gone: bool = False


Reconcile = Callable[[JobKey], Awaitable[PassResult]]


def backoff_seconds(num_failures: int, jitter: float) -> float:
    """Pause after a number of failures in a row.

    Args:
        num_failures: At least 1.
        jitter: In [0, 1). It spreads jobs that failed together.
    """
    pause = min(BACKOFF_MAX_SECONDS, BACKOFF_FIRST_SECONDS * 2.0 ** (num_failures - 1))
    return float(pause * (0.5 + 0.5 * jitter))


class Controller:
    """Runs `reconcile` for every job that is woken."""

    def __init__(self, reconcile: Reconcile, *, max_concurrent: int = 8) -> None:
        self._reconcile = reconcile
        self._slots = asyncio.Semaphore(max_concurrent)
        self._wakes: dict[JobKey, asyncio.Event] = {}
        self._tasks: dict[JobKey, asyncio.Task[None]] = {}
        self._stopped = False

    def wake(self, key: JobKey) -> None:
        """Request a pass for the job.

        Cheap, and safe to call from anywhere in the event loop.
        """
        if self._stopped:
            return
        if key not in self._tasks:
            self._wakes[key] = asyncio.Event()
            self._tasks[key] = asyncio.create_task(self._run(key), name=f"reconcile {key}")
        self._wakes[key].set()

    def wake_all(self) -> None:
        """Request a pass for every job."""
        for key in list(self._tasks):
            self.wake(key)

    @property
    def num_jobs(self) -> int:
        return len(self._tasks)

    async def stop(self) -> None:
        """Start no more passes, and cancel those that run.

        The next leader finishes what they started.
        """
        self._stopped = True
        tasks = list(self._tasks.values())
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def _run(self, key: JobKey) -> None:
        wake = self._wakes[key]
        result = PassResult()
        num_failures = 0
        while not (result.gone and not wake.is_set()):
            await _wait(wake, result.requeue_after)
            wake.clear()
            pause = 0.0
            async with self._slots:
                try:
                    with about(namespace=key.namespace, job=key.name):
                        result = await self._reconcile(key)
                    num_failures = 0
                except ConflictError:
                    pause = CONFLICT_SECONDS
                except ClusterError as error:
                    num_failures += 1
                    pause = backoff_seconds(num_failures, random.random())
                    logger.warning("%s: %s; retrying in %.1f s", key, error, pause)
                except Exception:
                    # A bug in one job's pass must not stop the passes of other jobs, nor later passes of this one.
                    num_failures += 1
                    pause = backoff_seconds(num_failures, random.random())
                    logger.exception("%s: the pass failed; retrying in %.1f s", key, pause)
            if pause:
                await asyncio.sleep(pause)
                wake.set()
        del self._wakes[key], self._tasks[key]


async def _wait(wake: asyncio.Event, seconds: float | None) -> None:
    """Wait until `wake` is set, or for `seconds` (None: without a limit)."""
    try:
        async with asyncio.timeout(seconds):
            await wake.wait()
    except TimeoutError:
        return
