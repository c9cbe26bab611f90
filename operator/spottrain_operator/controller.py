"""Wakes and reconcile passes.

A job has one pass at a time. Many jobs have theirs side by side, up to a limit.

A wake reports that something may have changed, but not what. All wakes during a pass, or while one waits, lead to one
more pass. A failed pass is retried after a growing pause with jitter. Only an urgent wake, for a notice or a loss,
shortens that pause.

Each priority has places of its own, so that an urgent pass never waits for bookkeeping, and a flood of them stops
nothing else. An urgent pass leaves its place as soon as the agents have their assignments: its rest is bookkeeping.
"""

from __future__ import annotations

import asyncio
import logging
import random
from collections.abc import Awaitable, Callable, Iterable, Mapping
from dataclasses import dataclass, field
from enum import IntEnum
from functools import partial
from typing import Protocol

from spottrain_operator.core.timing import growing_pause
from spottrain_operator.kube.errors import ClusterError, ConflictError
from spottrain_operator.kube.identities import JobKey
from spottrain_operator.kube.limits import is_urgent
from spottrain_runtime.logs import about

logger = logging.getLogger(__name__)

BACKOFF_FIRST_SECONDS = 0.5
BACKOFF_MAX_SECONDS = 30.0
# A lost write race is normal (a user edits while the operator writes): read again soon.
CONFLICT_SECONDS = 0.1


class Priority(IntEnum):
    """The order of the jobs.

    - URGENT: there is a notice or a loss, and the agents train on because they have not heard of it.
    - ENDING: the same, but their generation ends already, or has ended. The next one waits for this.
    - NORMAL: all else.
    - LAST: the job is over.
    """

    URGENT = 0
    ENDING = 1
    NORMAL = 2
    LAST = 3


# Passes at once, by priority.
PLACES: Mapping[Priority, int] = {
    Priority.URGENT: 16,
    Priority.ENDING: 16,
    Priority.NORMAL: 8,
    Priority.LAST: 1,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class PassResult:
    """What a pass leaves to do.

    Attributes:
        requeue_after: Seconds until the next pass, even without a wake. None: wait for a wake.
        gone: The job is deleted, and needs no further pass.
    """

    requeue_after: float | None = None
    gone: bool = False


class Published(Protocol):
    """What a pass calls as soon as the agents have their assignments.

    The rest of an urgent pass then waits for a place like any other pass. `trains`: whether the assignments let a
    generation train on. If they don't, what comes next of this job is less urgent.
    """

    async def __call__(self, *, trains: bool) -> None: ...


Reconcile = Callable[[JobKey, Published], Awaitable[PassResult]]


def backoff_seconds(num_failures: int, jitter: float) -> float:
    """Pause after a number of failures in a row.

    Args:
        num_failures: At least 1.
        jitter: In [0, 1). It spreads jobs that failed together.
    """
    pause = growing_pause(num_failures, first=BACKOFF_FIRST_SECONDS, most=BACKOFF_MAX_SECONDS)
    return pause * (0.5 + 0.5 * jitter)


@dataclass(slots=True, kw_only=True)
class _Job:
    """A job that has passes.

    Attributes:
        asked: The most urgent wake since the newest pass began.
        trains: The agents train on, as far as is known.
        wake, hurry: Set by any wake, and by an urgent one.
        decided: Set once a pass has decided, or failed.
        turn: Set once a place is free; None while it doesn't wait for one.
        place: The kind of place that it has.
    """

    asked: Priority = Priority.LAST
    trains: bool = True
    wake: asyncio.Event = field(default_factory=asyncio.Event)
    hurry: asyncio.Event = field(default_factory=asyncio.Event)
    decided: asyncio.Event = field(default_factory=asyncio.Event)
    turn: asyncio.Future[None] | None = None
    place: Priority | None = None
    task: asyncio.Task[None] | None = None

    @property
    def priority(self) -> Priority:
        """The priority of the next pass."""
        return self.asked if self.trains else max(self.asked, Priority.ENDING)


class Controller:
    """Runs `reconcile` for every job that is woken."""

    def __init__(self, reconcile: Reconcile, *, places: Mapping[Priority, int] = PLACES) -> None:
        self._reconcile = reconcile
        self._free = dict(places)
        self._waiting: dict[Priority, dict[JobKey, _Job]] = {priority: {} for priority in Priority}
        self._jobs: dict[JobKey, _Job] = {}
        self._stopped = False

    def wake(self, key: JobKey, priority: Priority = Priority.NORMAL) -> None:
        """Request a pass for the job.

        Cheap, and safe to call from anywhere in the event loop.
        """
        if self._stopped:
            return
        job = self._jobs.get(key)
        if job is None:
            job = self._jobs[key] = _Job()
            job.task = asyncio.create_task(self._run(key, job), name=f"reconcile {key}")
        job.asked = min(job.asked, priority)
        self._move_up(key, job)
        job.wake.set()
        if priority is Priority.URGENT:
            job.hurry.set()

    def wake_all(self) -> None:
        """Request a pass for every job."""
        for key in list(self._jobs):
            self.wake(key)

    async def decided(self, keys: Iterable[JobKey]) -> None:
        """Wait until a pass over each of these jobs has decided, or failed."""
        for job in [self._jobs[key] for key in keys if key in self._jobs]:
            await job.decided.wait()

    async def stop(self) -> None:
        """Start no more passes, and cancel those that run.

        The next leader finishes what they started.
        """
        self._stopped = True
        tasks = [job.task for job in self._jobs.values() if job.task is not None]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def _run(self, key: JobKey, job: _Job) -> None:
        result = PassResult()
        num_failures = 0
        while not (result.gone and not job.wake.is_set()):
            await _wait(job.wake, result.requeue_after)
            priority = await self._wait_for_place(key, job, job.priority)
            is_urgent.set(priority <= Priority.ENDING)
            job.wake.clear()
            job.hurry.clear()
            job.asked = Priority.LAST
            pause = 0.0
            try:
                with about(namespace=key.namespace, job=key.name):
                    result = await self._reconcile(key, partial(self._published, key, job))
                num_failures = 0
            except ConflictError:
                pause = CONFLICT_SECONDS
            except ClusterError as error:
                num_failures += 1
                pause = _pause(num_failures, priority)
                if error.retry_after is not None:
                    pause = max(BACKOFF_FIRST_SECONDS, error.retry_after)
                logger.warning("%s: %s; retrying in %.1f s", key, error, pause)
            except Exception:
                # A bug in one job's pass must not stop the passes of other jobs, nor later passes of this one.
                num_failures += 1
                pause = _pause(num_failures, priority)
                logger.exception("%s: the pass failed; retrying in %.1f s", key, pause)
            finally:
                self._leave_place(job)
                job.decided.set()
            if pause:
                job.asked = min(job.asked, priority)  # what was urgent still is
                await _wait(job.hurry, pause)
                job.wake.set()
        del self._jobs[key]

    async def _published(self, key: JobKey, job: _Job, *, trains: bool) -> None:
        job.trains = trains
        job.decided.set()
        if is_urgent.get():
            is_urgent.set(False)
            self._leave_place(job)
            await self._wait_for_place(key, job, Priority.NORMAL)

    async def _wait_for_place(self, key: JobKey, job: _Job, priority: Priority) -> Priority:
        """Wait for a place.

        Returns its kind, which may be better than `priority` by then.
        """
        job.turn = asyncio.get_running_loop().create_future()
        self._waiting[priority][key] = job
        self._admit()
        try:
            await job.turn
        except asyncio.CancelledError:
            for waiting in self._waiting.values():
                waiting.pop(key, None)
            raise
        finally:
            job.turn = None
        assert job.place is not None
        return job.place

    def _leave_place(self, job: _Job) -> None:
        if job.place is not None:
            self._free[job.place] += 1
            job.place = None
            self._admit()

    def _move_up(self, key: JobKey, job: _Job) -> None:
        """Let a job that waits for a place wait for a better one, if its priority is."""
        for priority, waiting in self._waiting.items():
            if priority > job.priority and waiting.pop(key, None) is not None:
                self._waiting[job.priority][key] = job
                self._admit()

    def _admit(self) -> None:
        """Give free places to those that wait, the first one first."""
        for priority, waiting in self._waiting.items():
            while waiting and self._free[priority] > 0 and not self._stopped:
                job = waiting.pop(next(iter(waiting)))
                self._free[priority] -= 1
                job.place = priority
                if job.turn is not None:
                    job.turn.set_result(None)


def _pause(num_failures: int, priority: Priority) -> float:
    """Return the seconds until a failed pass is repeated.

    No growing back-off delays a notice or a loss.
    """
    return backoff_seconds(1 if priority <= Priority.ENDING else num_failures, random.random())


async def _wait(event: asyncio.Event, seconds: float | None) -> None:
    """Wait until `event` is set, or for `seconds` (None: without a limit)."""
    try:
        async with asyncio.timeout(seconds):
            await event.wait()
    except TimeoutError:
        return
