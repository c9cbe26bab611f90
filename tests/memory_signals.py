"""A source of signals in this process's memory.

It announces what a test hands to it.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

from spottrain_api.contract.notices import Notice


class MemorySource:
    """Implements SignalSource with the notices that `announce` was given last."""

    def __init__(self, name: str = "memory") -> None:
        self._name = name
        self._notices: tuple[Notice, ...] = ()
        self._changed = asyncio.Condition()
        self.trouble: str | None = None
        self.starting = False

    @property
    def name(self) -> str:
        return self._name

    async def announce(self, *notices: Notice) -> None:
        """From now on these, and no others, are announced."""
        async with self._changed:
            self._notices = notices
            self._changed.notify_all()

    async def watch(self) -> AsyncIterator[tuple[Notice, ...]]:
        announced: tuple[Notice, ...] | None = None
        while True:
            async with self._changed:
                while self._notices == announced:
                    await self._changed.wait()
                announced = self._notices
            yield announced
