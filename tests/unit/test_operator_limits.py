"""The limit on requests: a burst, then so many a second, and urgent ones first."""

from __future__ import annotations

import asyncio

from spottrain_operator.kube.limits import TOKENS_PER_ORDINARY, ClientLimits, RequestLimiter, is_urgent


class Clock:
    """Time that passes only when a test lets it."""

    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


async def settle() -> None:
    for _ in range(10):
        await asyncio.sleep(0)


async def test_a_burst_and_then_so_many_a_second() -> None:
    clock = Clock()
    limiter = RequestLimiter(ClientLimits(qps=1000.0, burst=3), clock=clock)
    sent: list[int] = []

    async def send(number: int) -> None:
        await limiter.turn()
        sent.append(number)

    tasks = [asyncio.create_task(send(number)) for number in range(6)]
    await settle()
    assert sent == [0, 1, 2]
    clock.now += 0.0025
    async with asyncio.timeout(5):
        await asyncio.wait(tasks[:5])
    assert sent == [0, 1, 2, 3, 4]
    clock.now += 1.0
    async with asyncio.timeout(5):
        await asyncio.wait(tasks)
    assert sent == [0, 1, 2, 3, 4, 5]


async def test_urgent_requests_go_first() -> None:
    clock = Clock()
    limiter = RequestLimiter(ClientLimits(qps=1000.0, burst=1), clock=clock)
    sent: list[str] = []

    async def send(name: str) -> None:
        is_urgent.set(name == "urgent")
        await limiter.turn()
        sent.append(name)

    await send("first")
    ordinary = [asyncio.create_task(send(f"ordinary {number}")) for number in range(3)]
    await settle()
    urgent = asyncio.create_task(send("urgent"))
    await settle()
    clock.now += 0.0015
    async with asyncio.timeout(5):
        await urgent
    assert sent == ["first", "urgent"]
    ordinary[0].cancel()  # a token goes to nobody who has gone
    for waiting in ordinary[1:]:
        clock.now += 0.0015
        async with asyncio.timeout(5):
            await waiting
    assert sent == ["first", "urgent", "ordinary 1", "ordinary 2"]


async def test_urgent_requests_leave_one_token_of_some_to_the_others() -> None:
    clock = Clock()
    num_tokens = 2 * TOKENS_PER_ORDINARY
    limiter = RequestLimiter(ClientLimits(qps=1000.0, burst=num_tokens), clock=clock)
    for _ in range(num_tokens):
        await limiter.turn()
    sent: list[str] = []

    async def send(name: str) -> None:
        is_urgent.set(name == "urgent")
        await limiter.turn()
        sent.append(name)

    tasks = [asyncio.create_task(send("ordinary")) for _ in range(num_tokens)]
    tasks += [asyncio.create_task(send("urgent")) for _ in range(num_tokens)]
    await settle()
    clock.now += 1.0
    async with asyncio.timeout(5):
        while len(sent) < num_tokens:  # noqa: ASYNC110 - any number of tasks
            await asyncio.sleep(0.001)
    assert sent == 2 * [*["urgent"] * (TOKENS_PER_ORDINARY - 1), "ordinary"]
    for task in tasks:
        task.cancel()


async def test_after_a_pause_there_is_one_burst_and_no_more() -> None:
    clock = Clock()
    limiter = RequestLimiter(ClientLimits(qps=10.0, burst=2), clock=clock)
    clock.now += 3600
    for _ in range(2):
        await limiter.turn()
    waits = asyncio.create_task(limiter.turn())
    await settle()
    assert not waits.done()
    waits.cancel()
