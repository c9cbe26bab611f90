"""Connects the parts: sources → ledger → agents (notice API) and operator (Node)."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Sequence
from datetime import UTC, datetime
from typing import Protocol

from aiohttp import web

from spottrain_api.contract.names import LONG_POLL_SECONDS, PATH_NOTICE
from spottrain_api.contract.notices import Notice, NoticeList
from spottrain_runtime.wording import one_line
from spottrain_watcher.ledger import Ledger
from spottrain_watcher.metrics import Metrics, hears_cloud
from spottrain_watcher.provider import ENV_PROVIDER
from spottrain_watcher.signal_source import SignalSource

logger = logging.getLogger(__name__)

# How often the sources are asked whether they hear anything.
TROUBLE_SECONDS = 1.0


class Marker(Protocol):
    """Shows the notice for the whole node, and that a watcher runs there."""

    def show(self, notice: Notice | None) -> None: ...

    def renew(self) -> None:
        """Write again what was written last."""
        ...


class Watcher:
    """The watcher of one spot node.

    Agents ask it for notices; it calls only the API server and the sources. With notices it gives its `proof`, whose
    hash the marker writes on the Node: anybody may listen on the port of a node without a watcher.
    """

    def __init__(self, sources: Sequence[SignalSource], marker: Marker, proof: str) -> None:
        self._sources = list(sources)
        self._proof = proof
        self._marker = marker
        self._metrics = Metrics(self._sources)
        self._ledger = Ledger()
        self._trouble = self._present_trouble()
        self._starting = self._only_starting()
        self._owns_mark = False
        self._changed = asyncio.Condition()

    async def run(self, late: Awaitable[SignalSource] | None = None) -> None:
        """Follow all sources until cancelled, and `late` from when it is there."""
        if not hears_cloud(self._sources):
            logger.warning(
                "Only the signals of Kubernetes are heard: the node belongs to no cloud that the watcher knows. "
                "If it does, name the cloud in %s (the chart's value watcher.env).",
                ENV_PROVIDER,
            )
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(self._follow_trouble())
            for source in self._sources:
                tasks.create_task(self._follow(source))
            if late is not None:
                source = await late
                async with self._changed:
                    self._sources.append(source)
                    self._trouble, self._starting = self._present_trouble(), self._only_starting()
                    self._changed.notify_all()
                self._metrics.add(source)
                tasks.create_task(self._follow(source))

    def application(self) -> web.Application:
        """The notice API: GET /v1/notice?after=<revision>.

        It also serves /healthz, /readyz and /metrics.
        """
        application = web.Application()
        application.router.add_get(PATH_NOTICE, self._serve_notices)
        application.router.add_get("/healthz", _serve_health)
        application.router.add_get("/readyz", self._serve_readiness)
        application.router.add_get("/metrics", self._serve_metrics)
        return application

    def _present_trouble(self) -> str | None:
        """Why some sources can't be heard, in a line; None while all answer."""
        troubles = [one_line(source.trouble) for source in self._sources if source.trouble]
        return " ".join(troubles) or None

    def _only_starting(self) -> bool:
        """Whether the first answers alone are missing, and none is late."""
        troubled = [source for source in self._sources if source.trouble]
        return bool(troubled) and all(source.starting for source in troubled)

    async def _follow_trouble(self) -> None:
        while True:
            trouble, starting = self._present_trouble(), self._only_starting()
            if (trouble, starting) != (self._trouble, self._starting):
                if starting:
                    logger.info("waiting for the first answer: %s", trouble)
                elif trouble:
                    logger.warning("notices may not be heard: %s", trouble)
                else:
                    logger.info("all sources answer")
                async with self._changed:
                    self._trouble, self._starting = trouble, starting
                    self._changed.notify_all()
            await asyncio.sleep(TROUBLE_SECONDS)

    async def _follow(self, source: SignalSource) -> None:
        async for notices in source.watch():
            async with self._changed:
                self._ledger = self._ledger.observe(source.name, notices, datetime.now(UTC))
                self._changed.notify_all()
            self._metrics.announced(source, notices)
            logger.info("%s announces: %s", source.name, [notice.to_json() for notice in notices])
            shown = self._ledger.for_node()
            # Until all sources have reported, a mark of an earlier watcher may be right. A hint doesn't replace it.
            # Once it is replaced, the Node shows what this watcher says.
            self._owns_mark |= self._has_heard_all() or (shown is not None and shown.makes_drain)
            if self._owns_mark:
                self._marker.show(shown)
            else:
                self._marker.renew()  # the Node may have been registered anew

    def _has_heard_all(self) -> bool:
        """Whether each source has reported since the start."""
        return len(self._ledger.by_source) == len(self._sources)

    def _has_news(self, after: str) -> bool:
        """Whether there is something to say to who knows the revision `after`.

        What a list without a trouble leaves out is taken back. So it waits for a source that has answered to report.
        """
        sure = self._trouble is not None or self._has_heard_all()
        return sure and self._notice_list().revision != after

    def _notice_list(self) -> NoticeList:
        found = self._ledger.notice_list(
            self._trouble, starting=self._starting, hears_cloud=hears_cloud(self._sources)
        )
        return found.model_copy(update={"proof": self._proof if found.notices else None})

    async def _serve_notices(self, request: web.Request) -> web.Response:
        after = request.query.get("after", "")
        try:
            async with asyncio.timeout(LONG_POLL_SECONDS), self._changed:
                await self._changed.wait_for(lambda: self._has_news(after))
        except TimeoutError:
            self._metrics.answered(changed=False)
            return web.Response(status=204)
        self._metrics.answered(changed=True)
        return web.Response(text=self._notice_list().to_json(), content_type="application/json")

    async def _serve_readiness(self, _: web.Request) -> web.Response:
        trouble = self._present_trouble()
        return web.Response(text=trouble or "ok", status=503 if trouble else 200)

    async def _serve_metrics(self, _: web.Request) -> web.Response:
        body, content_type = self._metrics.exposition()
        return web.Response(body=body, headers={"Content-Type": content_type})


async def _serve_health(_: web.Request) -> web.Response:
    return web.Response(text="ok")
