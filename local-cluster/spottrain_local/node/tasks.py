"""Waiting for tasks, and tasks beside other work."""

import asyncio
import contextlib
import logging
from collections.abc import AsyncIterator, Coroutine
from typing import Any

logger = logging.getLogger(__name__)


async def until(end: asyncio.Event, action: Coroutine[Any, Any, object]) -> None:
    """Wait for an action, and cancel it if `end` is set before."""
    tasks = [asyncio.create_task(end.wait()), asyncio.create_task(action)]
    try:
        await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
    finally:
        await _cancel(tasks)


@contextlib.asynccontextmanager
async def background(*work: Coroutine[Any, Any, None]) -> AsyncIterator[None]:
    """Run coroutines beside a block, and cancel them at its end.

    If one fails, log it and continue the block.
    """
    tasks = [asyncio.create_task(w) for w in work]
    for task in tasks:
        task.add_done_callback(_log_failure)
    try:
        yield
    finally:
        await _cancel(tasks)


async def _cancel(tasks: list[asyncio.Task[Any]]) -> None:
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


def _log_failure(task: asyncio.Task[None]) -> None:
    if not task.cancelled() and (error := task.exception()):
        logger.error("%s failed", task.get_coro(), exc_info=error)
