"""The rate and the order of the operator's requests to the API server."""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Callable
from contextvars import ContextVar
from dataclasses import dataclass

is_urgent: ContextVar[bool] = ContextVar("is_urgent", default=False)
"""Whether agents wait for the running task to act on a notice or a loss, so that its requests go first."""

# Of so many tokens, one goes to a request that isn't urgent, so that a flood of urgent ones never stops the others.
TOKENS_PER_ORDINARY = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class ClientLimits:
    """Requests a second on average, and at once after a pause."""

    qps: float = 100.0
    burst: int = 600


DEFAULT_LIMITS = ClientLimits()


class RequestLimiter:
    """A bucket of tokens that limits requests.

    Each request takes a token, and waits if there is none. Urgent requests go first, except for some tokens.
    """

    def __init__(self, limits: ClientLimits, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._limits = limits
        self._clock = clock
        self._tokens = float(limits.burst)
        self._filled_at = clock()
        self._urgent: deque[asyncio.Future[None]] = deque()
        self._ordinary: deque[asyncio.Future[None]] = deque()
        self._num_passed_over = 0
        self._timer: asyncio.TimerHandle | None = None

    async def turn(self) -> None:
        """Wait for a token."""
        if not (self._urgent or self._ordinary) and self._use_token():
            return
        turn: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        (self._urgent if is_urgent.get() else self._ordinary).append(turn)
        self._serve()
        await turn

    def _use_token(self) -> bool:
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
        while (waiting := self._next()) is not None:
            if waiting[0].done():  # its request was cancelled
                waiting.popleft()
            elif self._use_token():
                waiting.popleft().set_result(None)
                self._num_passed_over = self._num_passed_over + 1 if waiting is self._urgent and self._ordinary else 0
            else:
                seconds = (1.0 - self._tokens) / self._limits.qps
                self._timer = asyncio.get_running_loop().call_later(seconds, self._serve)
                return

    def _next(self) -> deque[asyncio.Future[None]] | None:
        """The queue that gets the next token; None if nobody waits."""
        if self._ordinary and (not self._urgent or self._num_passed_over >= TOKENS_PER_ORDINARY - 1):
            return self._ordinary
        return self._urgent or None
