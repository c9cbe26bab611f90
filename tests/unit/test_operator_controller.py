"""The wake queue: coalescing, back-off, and jobs that go away.

Each job has one pass at a time.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from functools import partial
from itertools import pairwise

from spottrain_operator.controller import (
    BACKOFF_MAX_SECONDS,
    Controller,
    PassResult,
    Priority,
    Published,
    backoff_seconds,
)
from spottrain_operator.kube.errors import ClusterError, ConflictError
from spottrain_operator.kube.identities import JobKey

A = JobKey(namespace="team", name="a")
B = JobKey(namespace="team", name="b")


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(5):
        while not condition():  # noqa: ASYNC110 - any condition
            await asyncio.sleep(0.001)


class Passes:
    """A reconcile that records, and that a test can hold up.

    It can be held up before the assignments are out, and after that, by job.
    """

    def __init__(self) -> None:
        self.made: list[JobKey] = []
        self.made_at: list[float] = []
        self.running: list[JobKey] = []
        self.published: list[JobKey] = []
        self.most_at_once = 0
        self.gate = asyncio.Event()
        self.gate.set()
        self.rest_gates: dict[JobKey, asyncio.Event] = {}
        self.drains: set[JobKey] = set()
        self.results: dict[JobKey, PassResult] = {}
        self.errors: dict[JobKey, list[Exception]] = {}

    async def __call__(self, key: JobKey, published: Published) -> PassResult:
        assert key not in self.running, "two passes over one job at once"
        self.running.append(key)
        self.most_at_once = max(self.most_at_once, len(self.running))
        try:
            await self.gate.wait()
            self.published.append(key)
            await published(trains=key not in self.drains)
            if key in self.rest_gates:
                await self.rest_gates[key].wait()
            self.made.append(key)
            self.made_at.append(asyncio.get_running_loop().time())
            if self.errors.get(key):
                raise self.errors[key].pop(0)
            return self.results.get(key, PassResult())
        finally:
            self.running.remove(key)

    def hold_rest_of(self, *keys: JobKey) -> None:
        self.rest_gates = {key: asyncio.Event() for key in keys}


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
    controller = Controller(passes, places=dict.fromkeys(Priority, 2))
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


async def test_a_refusal_for_now_costs_the_wait_that_the_api_server_asks_for() -> None:
    """And no growing pause after many of them."""
    passes = Passes()
    passes.errors[A] = [*[ClusterError("down")] * 2, *[ClusterError("too many requests", retry_after=0.6)] * 2]
    controller = Controller(passes)
    controller.wake(A)
    await until(lambda: len(passes.made) == 5)
    pauses = [after - before for before, after in pairwise(passes.made_at)]
    assert min(pauses[2:]) >= 0.6, pauses
    assert not passes.errors[A]
    await controller.stop()


async def test_a_job_that_is_gone_leaves_nothing_and_can_come_back() -> None:
    passes = Passes()
    passes.results[A] = PassResult(gone=True)
    controller = Controller(passes)
    controller.wake(A)
    await until(lambda: passes.made == [A] and not controller._jobs)
    passes.results[A] = PassResult()
    controller.wake(A)
    await until(lambda: passes.made == [A, A] and list(controller._jobs) == [A])
    await controller.stop()


async def test_a_job_counts_as_decided_once_its_assignments_are_out_or_its_pass_has_failed() -> None:
    passes = Passes()
    passes.hold_rest_of(A)
    passes.gate.clear()
    passes.errors[B] = [ClusterError("down")]
    controller = Controller(passes)
    controller.wake(A)
    controller.wake(B)
    decided = asyncio.create_task(controller.decided([A, B, JobKey(namespace="team", name="unknown")]))
    await until(lambda: passes.running == [A, B])
    assert not decided.done()
    passes.gate.set()
    async with asyncio.timeout(5):
        await decided
    assert A not in passes.made
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
    assert backoff_seconds(50, 1.0) == backoff_seconds(5000, 1.0) == 30.0
    assert backoff_seconds(3, 0.0) == 1.0


FEW = dict.fromkeys(Priority, 1)
C = JobKey(namespace="team", name="c")
D = JobKey(namespace="team", name="d")


async def test_a_notice_waits_for_no_bookkeeping() -> None:
    """All places of ordinary passes are taken, and others wait for them."""
    passes = Passes()
    passes.gate.clear()
    controller = Controller(passes, places=FEW)
    for key in (A, B, C):
        controller.wake(key)
    await until(lambda: passes.running == [A])
    controller.wake(C, Priority.URGENT)
    await until(lambda: passes.running == [A, C])
    controller.wake(D, Priority.URGENT)
    passes.gate.set()
    await until(lambda: len(passes.made) == 4)
    assert passes.made.index(D) < passes.made.index(B) or passes.most_at_once == 2
    await controller.stop()


async def test_a_job_that_is_over_takes_no_place_of_the_others() -> None:
    passes = Passes()
    passes.gate.clear()
    controller = Controller(passes, places=FEW)
    controller.wake(A, Priority.LAST)
    controller.wake(B, Priority.LAST)
    controller.wake(C)
    await until(lambda: sorted(passes.running) == [A, C])
    passes.gate.set()
    await until(lambda: sorted(passes.made) == [A, B, C])
    await controller.stop()


async def test_a_wake_after_an_urgent_one_leaves_it_urgent() -> None:
    passes = Passes()
    passes.gate.clear()
    controller = Controller(passes, places=FEW)
    controller.wake(A)
    controller.wake(B)
    await until(lambda: passes.running == [A])
    controller.wake(B, Priority.URGENT)
    controller.wake(B, Priority.LAST)
    await until(lambda: passes.running == [A, B])
    passes.gate.set()
    await controller.stop()


async def test_a_notice_ends_the_pause_after_failures() -> None:
    passes = Passes()
    passes.errors[A] = [ClusterError("down")] * 12
    controller = Controller(passes, places=FEW)
    controller.wake(A)
    for num_failed in range(1, 13):
        controller.wake(A, Priority.URGENT)
        await until(partial(lambda num: len(passes.made) >= num, num_failed))
    await until(lambda: len(passes.made) == 13)  # had the back-off grown, it would be at its bound
    assert BACKOFF_MAX_SECONDS > 5, "longer than `until` waits"
    await controller.stop()


async def test_a_notice_does_not_wait_as_long_as_the_api_server_asks() -> None:
    """The API server may be back before. The other jobs wait."""
    passes = Passes()
    for key in (A, B):
        passes.errors[key] = [ClusterError("too many requests", retry_after=60.0)]
    controller = Controller(passes)
    controller.wake(A)
    controller.wake(B)
    await until(lambda: passes.made == [A, B])
    controller.wake(A)
    controller.wake(B, Priority.URGENT)
    await until(lambda: passes.made == [A, B, B])
    await controller.stop()


async def test_an_ordinary_wake_does_not_end_the_pause_after_failures() -> None:
    passes = Passes()
    passes.errors[A] = [ClusterError("down"), ClusterError("down")]
    controller = Controller(passes, places=FEW)
    controller.wake(A)
    await until(lambda: len(passes.made) == 1)
    for _ in range(20):
        controller.wake(A)
        await asyncio.sleep(0.001)
    assert len(passes.made) == 1
    await controller.stop()


async def test_a_place_is_free_again_after_a_pass_that_was_cancelled_while_it_waited() -> None:
    passes = Passes()
    passes.gate.clear()
    controller = Controller(passes, places=FEW)
    controller.wake(A)
    controller.wake(B)
    await until(lambda: passes.running == [A])
    await controller.stop()
    assert passes.running == []


async def test_an_assignment_waits_for_no_rest_of_another_pass() -> None:
    passes = Passes()
    passes.hold_rest_of(A, B)
    controller = Controller(passes, places=FEW)
    for key in (A, B, C, D):
        controller.wake(key, Priority.URGENT)
    await until(lambda: passes.published == [A, B, C, D])
    assert passes.made == [], "one place of the rest is taken, and three wait for it"
    for key in (A, B):
        passes.rest_gates[key].set()
    await until(lambda: sorted(passes.made) == [A, B, C, D])
    await controller.stop()


async def test_new_trouble_goes_before_a_generation_that_ends() -> None:
    """A ends. Its agents have heard, and report that they have drained."""
    passes = Passes()
    passes.drains = {A}
    controller = Controller(passes, places=FEW)
    controller.wake(A, Priority.URGENT)
    await until(lambda: passes.made == [A])
    passes.gate.clear()
    controller.wake(B, Priority.URGENT)
    controller.wake(A, Priority.URGENT)
    controller.wake(C, Priority.URGENT)
    await until(lambda: passes.running == [B, A])  # A has not taken the place for which C waits
    passes.hold_rest_of(A)
    passes.gate.set()
    await until(lambda: C in passes.published)
    await controller.stop()


async def test_the_rest_of_a_pass_waits_in_line_with_bookkeeping() -> None:
    """So a flood of notices in one namespace doesn't stop the jobs of others."""
    passes = Passes()
    passes.hold_rest_of(A)
    controller = Controller(passes, places=FEW)
    controller.wake(A)
    await until(lambda: passes.running == [A])
    controller.wake(B, Priority.URGENT)
    await until(lambda: passes.published == [A, B])
    controller.wake(C)
    controller.wake(D, Priority.URGENT)
    await until(lambda: D in passes.published)
    passes.rest_gates[A].set()
    await until(lambda: passes.made == [A, B, C, D])
    await controller.stop()


async def test_trouble_of_the_same_job_does_not_wait_behind_bookkeeping_for_the_rest() -> None:
    passes = Passes()
    passes.drains = {B}
    passes.hold_rest_of(A)
    controller = Controller(passes, places=FEW)
    controller.wake(A)
    await until(lambda: passes.running == [A])
    controller.wake(B, Priority.URGENT)
    await until(lambda: passes.published == [A, B])
    controller.wake(B, Priority.URGENT)
    await until(lambda: passes.published == [A, B, B])
    assert passes.made == [B], "the rest of the second one waits again"
    await controller.stop()


async def test_endless_notices_of_one_job_leave_places_to_the_others() -> None:
    passes = Passes()

    async def flooded(key: JobKey, published: Published) -> PassResult:
        if key == A:
            controller.wake(A, Priority.URGENT)
            await asyncio.sleep(0)
        return await passes(key, published)

    controller = Controller(flooded, places=FEW)
    controller.wake(A, Priority.URGENT)
    await until(lambda: passes.made.count(A) > 5)
    controller.wake(B)
    controller.wake(C, Priority.LAST)
    await until(lambda: {B, C} <= set(passes.made))
    num_made = passes.made.count(A)
    await until(lambda: passes.made.count(A) > num_made)
    await controller.stop()
