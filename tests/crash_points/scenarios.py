"""Pieces of a job's life. Each ends when the job is as it should be then."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping

from crash_points.run import Run

MEMBERS = 2


async def start(run: Run) -> None:
    await run.arm()
    await run.create(MEMBERS)
    await run.until_trains(1, MEMBERS)


async def growth(run: Run) -> None:
    """A third node comes after the start."""
    run.kubelets.free_nodes = asyncio.Semaphore(MEMBERS)
    await run.create(MEMBERS + 1)
    await run.until_trains(1, MEMBERS, num_waiting=1)
    await run.arm()
    run.kubelets.free_nodes.release()
    await run.until_trains(2, MEMBERS + 1)


async def preemption(run: Run) -> None:
    """A spot node gets a notice, and another one comes."""
    await run.create(MEMBERS)
    await run.until_trains(1, MEMBERS)
    await run.arm()
    run.take_notice()
    await run.until_trains(2, MEMBERS)


async def edit(run: Run) -> None:
    """The pod template changes."""
    await run.create(MEMBERS)
    await run.until_trains(1, MEMBERS)
    await run.arm()
    await run.change(image="crash/other")
    await run.until_trains(2, MEMBERS)


async def suspension(run: Run) -> None:
    """The job is suspended, and resumed."""
    await run.create(MEMBERS)
    await run.until_trains(1, MEMBERS)
    await run.arm()
    await run.change(runPolicy={"suspend": True})
    await run.until_phase("Suspended")
    await run.change(runPolicy={"suspend": False})
    await run.until_trains(2, MEMBERS)


async def completion(run: Run) -> None:
    await run.create(MEMBERS)
    await run.until_trains(1, MEMBERS)
    await run.arm()
    run.training.finish()
    await run.until_phase("Succeeded")


async def deletion(run: Run) -> None:
    """The job is deleted while it trains."""
    await run.create(MEMBERS)
    await run.until_trains(1, MEMBERS)
    await run.arm()
    await run.delete()
    await run.until_phase("gone")


Scenario = Callable[[Run], Awaitable[None]]
SCENARIOS: Mapping[str, Scenario] = {
    each.__name__: each for each in (start, growth, preemption, edit, suspension, completion, deletion)
}
