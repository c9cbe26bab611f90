"""The wake queue: coalescing, back-off, and jobs that go away.

Each job has one pass at a time.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from spottrain_operator.cluster.client import ClusterError, ConflictError, JobKey
from spottrain_operator.controller import Controller, PassResult, backoff_seconds

A = JobKey(namespace="team", name="a")
B = JobKey(namespace="team", name="b")


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(5):
        while not condition():  # noqa: ASYNC110 - any condition
            await asyncio.sleep(0.001)


class Passes:
    """A reconcile that records, and that a test can hold up."""

    def __init__(self) -> None:
        self.made: list[JobKey] = []
        self.running: list[JobKey] = []
        self.most_at_once = 0
        self.gate = asyncio.Event()
        self.gate.set()
        self.results: dict[JobKey, PassResult] = {}
        self.errors: dict[JobKey, list[Exception]] = {}

    async def __call__(self, key: JobKey) -> PassResult:
        assert key not in self.running, "two passes over one job at once"
        self.running.append(key)
        self.most_at_once = max(self.most_at_once, len(self.running))
        try:
            await self.gate.wait()
            self.made.append(key)
            if self.errors.get(key):
                raise self.errors[key].pop(0)
            return self.results.get(key, PassResult())
        finally:
            self.running.remove(key)


async def test_wakes_during_a_pass_become_one_more_pass() -> None:
    passes = Passes()
    passes.gate.clear()
    controller = Controller(passes)
    controller.wake(A)
    await until(lambda: passes.running == [A])
    for _ in range(10):
        controller.wake(A)
    passes.gate.set()
    await until(lambda: len(passes.made) == 2)
    await asyncio.sleep(0.02)
    assert passes.made == [A, A]
    await controller.stop()


async def test_a_pass_is_repeated_when_it_asks_for_it() -> None:
    passes = Passes()
    passes.results[A] = PassResult(requeue_after=0.001)
    controller = Controller(passes)
    controller.wake(A)
    await until(lambda: len(passes.made) >= 3)
    await controller.stop()


async def test_no_more_jobs_at_once_than_allowed() -> None:
    passes = Passes()
    passes.gate.clear()
    controller = Controller(passes, max_concurrent=2)
    keys = [JobKey(namespace="team", name=f"job-{n}") for n in range(6)]
    for key in keys:
        controller.wake(key)
    await until(lambda: len(passes.running) == 2)
    passes.gate.set()
    await until(lambda: sorted(passes.made) == keys)
    assert passes.most_at_once == 2
    await controller.stop()


async def test_a_failing_job_is_tried_again_and_disturbs_no_other() -> None:
    passes = Passes()
    passes.errors[A] = [ClusterError("down"), ConflictError("changed"), RuntimeError("a bug")]
    controller = Controller(passes)
    controller.wake(A)
    controller.wake(B)
    await until(lambda: passes.made.count(B) == 1)
    await until(lambda: passes.made.count(A) == 4)
    await controller.stop()


async def test_a_job_that_is_gone_leaves_nothing_and_can_come_back() -> None:
    passes = Passes()
    passes.results[A] = PassResult(gone=True)
    controller = Controller(passes)
    controller.wake(A)
    await until(lambda: passes.made == [A] and controller.num_jobs == 0)
    passes.results[A] = PassResult()
    controller.wake(A)
    await until(lambda: passes.made == [A, A] and controller.num_jobs == 1)
    await controller.stop()


async def test_nothing_begins_after_stop() -> None:
    passes = Passes()
    controller = Controller(passes)
    controller.wake(A)
    await until(lambda: passes.made == [A])
    await controller.stop()
    controller.wake(B)
    await asyncio.sleep(0.01)
    assert passes.made == [A]


def test_back_off_grows_to_its_bound_and_spreads() -> None:
    assert [backoff_seconds(n, 1.0) for n in (1, 2, 3)] == [0.5, 1.0, 2.0]
    assert backoff_seconds(50, 1.0) == 30.0
    assert backoff_seconds(3, 0.0) == 1.0
