"""Connects the parts: sources → ledger → agents (notice API) and operator (Node)."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence
from datetime import UTC, datetime
from typing import Protocol

from aiohttp import web

from spottrain_api.contract import LONG_POLL_SECONDS, PATH_NOTICE, Notice, NoticeList
from spottrain_watcher.ledger import Ledger
from spottrain_watcher.signal_source import SignalSource

logger = logging.getLogger(__name__)


class Marker(Protocol):
    """Shows the notice for the whole node."""

    def show(self, notice: Notice | None) -> None: ...


class Watcher:
    """The watcher of one spot node. Agents ask it for notices; it calls only the API server and the sources."""

    def __init__(self, sources: Sequence[SignalSource], marker: Marker) -> None:
        self._sources = sources
        self._marker = marker
        self._ledger = Ledger()
        self._changed = asyncio.Condition()

    async def run(self) -> None:
        """Follow all sources until cancelled."""
        async with asyncio.TaskGroup() as tasks:
            for source in self._sources:
                tasks.create_task(self._follow(source))

    def application(self) -> web.Application:
        """The notice API: GET /v1/notice?after=<revision> and /healthz."""
        application = web.Application()
        application.router.add_get(PATH_NOTICE, self._serve_notices)
        application.router.add_get("/healthz", _serve_health)
        return application

    async def _follow(self, source: SignalSource) -> None:
        async for notices in source.watch():
            async with self._changed:
                self._ledger = self._ledger.observe(source.name, notices, datetime.now(UTC))
                self._changed.notify_all()
            logger.info("%s announces: %s", source.name, [notice.to_json() for notice in notices])
            # Until all sources have reported, a mark that an earlier watcher left may be right.
            if len(self._ledger.by_source) == len(self._sources) or self._ledger.for_node() is not None:
                self._marker.show(self._ledger.for_node())

    async def _serve_notices(self, request: web.Request) -> web.Response:
        after = request.query.get("after", "")
        try:
            async with asyncio.timeout(LONG_POLL_SECONDS), self._changed:
                await self._changed.wait_for(lambda: self._ledger.notice_list().revision != after)
        except TimeoutError:
            return web.Response(status=204)
        notices: NoticeList = self._ledger.notice_list()
        return web.Response(text=notices.to_json(), content_type="application/json")


async def _serve_health(_: web.Request) -> web.Response:
    return web.Response(text="ok")
