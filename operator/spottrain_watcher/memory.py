"""A SignalSource for tests: announces what it is told to."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

from spottrain_api.contract import Notice


class MemorySource:
    """Keeps its notices in memory."""

    def __init__(self, name: str = "memory") -> None:
        self._name = name
        self._notices: tuple[Notice, ...] = ()
        self._changed = asyncio.Condition()

    @property
    def name(self) -> str:
        return self._name

    async def announce(self, *notices: Notice) -> None:
        """From now on these, and no others, are announced."""
        async with self._changed:
            self._notices = notices
            self._changed.notify_all()

    async def watch(self) -> AsyncIterator[tuple[Notice, ...]]:
        told: tuple[Notice, ...] | None = None
        while True:
            async with self._changed:
                while self._notices == told:
                    await self._changed.wait()
                told = self._notices
            yield told
