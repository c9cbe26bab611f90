"""The watcher's notice API and what it shows on the Node, with a source in memory."""

from __future__ import annotations

import asyncio
import contextlib
import os
import subprocess
import sys
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta

import pytest
from aiohttp import web
from aiohttp.test_utils import TestClient, TestServer

from memory_signals import MemorySource
from spottrain_api.contract import Notice, NoticeList
from spottrain_watcher.watcher import Watcher

NOW = datetime(2026, 1, 1, tzinfo=UTC)
NOTICE = Notice(id="1", node="n", source="ec2", deadline=NOW + timedelta(minutes=2), observed_at=NOW)


@dataclass
class MemoryMarker:
    shown: list[Notice | None] = field(default_factory=list)
    changed: asyncio.Event = field(default_factory=asyncio.Event)

    def show(self, notice: Notice | None) -> None:
        self.shown.append(notice)
        self.changed.set()


@dataclass
class Service:
    client: TestClient[web.Request, web.Application]
    sources: tuple[MemorySource, MemorySource]
    marker: MemoryMarker

    async def ask(self, after: str = "") -> NoticeList:
        response = await self.client.get("/v1/notice", params={"after": after})
        return NoticeList.from_json(await response.read())


@pytest.fixture
async def service() -> AsyncIterator[Service]:
    sources = (MemorySource("ec2"), MemorySource("kubernetes"))
    marker = MemoryMarker()
    watcher = Watcher(sources, marker)
    task = asyncio.create_task(watcher.run())
    async with TestClient(TestServer(watcher.application())) as client:
        yield Service(client, sources, marker)
    task.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await task


async def test_a_long_poll_ends_when_a_notice_comes(service: Service) -> None:
    before = await service.ask()
    waiting = asyncio.create_task(service.ask(after=before.revision))
    await service.sources[0].announce(NOTICE)
    async with asyncio.timeout(2):
        assert (await waiting).notices == (NOTICE,)


async def test_whoever_asks_late_is_answered_at_once(service: Service) -> None:
    await service.sources[0].announce(NOTICE)
    await service.marker.changed.wait()
    async with asyncio.timeout(2):
        assert (await service.ask(after="what it knew before a restart")).notices == (NOTICE,)


async def test_the_node_is_marked_and_unmarked(service: Service) -> None:
    await service.sources[0].announce(NOTICE)
    async with asyncio.timeout(2):
        while NOTICE not in service.marker.shown:
            service.marker.changed.clear()
            await service.marker.changed.wait()
        await service.sources[0].announce()
        while service.marker.shown[-1] is not None:
            service.marker.changed.clear()
            await service.marker.changed.wait()


async def test_it_says_that_it_is_healthy(service: Service) -> None:
    assert (await service.client.get("/healthz")).status == 200


def test_an_unknown_provider_is_refused_before_anything_else() -> None:
    named = {"SPOTTRAIN_NODE_NAME": "n", "SPOTTRAIN_HOST_IP": "127.0.0.1", "SPOTTRAIN_PROVIDER": "gcp"}
    command = [sys.executable, "-m", "spottrain_watcher"]
    done = subprocess.run(
        command, env={**os.environ, **named}, capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == 2
    assert done.stderr.startswith("spottrain-watcher: SPOTTRAIN_PROVIDER: 'gcp' is not a provider.")
    assert done.stderr.count("\n") == 1
