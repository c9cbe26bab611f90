"""The rate and the order of the operator's requests to the API server."""

from __future__ import annotations

import asyncio
import heapq
import itertools
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass

is_urgent: ContextVar[bool] = ContextVar("is_urgent", default=False)
"""Whether the running task acts on a notice or a loss, so that its requests go first."""


@contextmanager
def urgently() -> Iterator[None]:
    """Let the requests inside go first."""
    token = is_urgent.set(True)
    try:
        yield
    finally:
        is_urgent.reset(token)


@dataclass(frozen=True, slots=True, kw_only=True)
class ClientLimits:
    """Requests a second on average, and at once after a pause."""

    qps: float = 100.0
    burst: int = 600


DEFAULT_LIMITS = ClientLimits()


class RequestLimiter:
    """A bucket of tokens that limits requests.

    Each request takes a token, and waits if there is none. Urgent requests go first.
    """

    def __init__(self, limits: ClientLimits, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._limits = limits
        self._clock = clock
        self._tokens = float(limits.burst)
        self._filled_at = clock()
        self._waiting: list[tuple[bool, int, asyncio.Future[None]]] = []
        self._order = itertools.count()
        self._timer: asyncio.TimerHandle | None = None

    async def turn(self) -> None:
        """Wait for a token."""
        if not self._waiting and self._take():
            return
        turn: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        heapq.heappush(self._waiting, (not is_urgent.get(), next(self._order), turn))
        self._serve()
        await turn

    def _take(self) -> bool:
        now = self._clock()
        filled = self._tokens + (now - self._filled_at) * self._limits.qps
        self._tokens, self._filled_at = min(float(self._limits.burst), filled), now
        if self._tokens < 1.0:
            return False
        self._tokens -= 1.0
        return True

    def _serve(self) -> None:
        """Hand out the tokens that there are, and come back when there is the next."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        while self._waiting:
            if self._waiting[0][-1].done():  # its request was cancelled
                heapq.heappop(self._waiting)
            elif self._take():
                heapq.heappop(self._waiting)[-1].set_result(None)
            else:
                seconds = (1.0 - self._tokens) / self._limits.qps
                self._timer = asyncio.get_running_loop().call_later(seconds, self._serve)
                return
