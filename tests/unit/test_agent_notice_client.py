"""An agent knows whether the notices reach it of its node.

The watcher answers, is blind, or is missing.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from datetime import UTC, datetime

import aiohttp
import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer

from spottrain_agent.notice_client import NoticeClient
from spottrain_api.contract.names import PATH_NOTICE
from spottrain_api.contract.notices import NodeWatch, Notice, NoticeList, WatchState, watcher_mark

NOW = datetime(2026, 1, 1, tzinfo=UTC)
NOTICE = Notice(id="1", node="n", source="ec2", deadline=NOW, observed_at=NOW)
BLIND = "EC2's metadata service gives no usable answer: refused."


@dataclass(slots=True)
class Watcher:
    """Answers polls with `notices`, or with an error while there are none.

    `client` asks it, by `clock`.
    """

    notices: NoticeList | None = None
    clock: float = 0.0
    received: asyncio.Queue[NoticeList] = field(default_factory=asyncio.Queue)
    refused: asyncio.Queue[int] = field(default_factory=asyncio.Queue)
    client: NoticeClient = field(init=False)
    body: str | None = None

    async def answer(self, request: web.Request) -> web.Response:
        if self.notices is None and self.body is None:
            self.refused.put_nowait(503)
            return web.Response(status=503)
        if self.notices is not None and request.query["after"] == self.notices.revision:
            await asyncio.sleep(0.05)
            return web.Response(status=204)
        return web.Response(text=self.body or (self.notices.to_json() if self.notices else ""))

    async def says(self, revision: str, trouble: str | None = None, *, starting: bool = False) -> NodeWatch:
        self.notices = NoticeList(revision=revision, trouble=trouble, starting=starting)
        async with asyncio.timeout(10):
            while (await self.received.get()).revision != revision:
                pass
        return self.client.watch

    async def is_doubted(self, why: str) -> None:
        async with asyncio.timeout(10):
            while why not in (self.client.watch.trouble or ""):  # noqa: ASYNC110
                await asyncio.sleep(0.01)
        assert self.client.watch.state is WatchState.MISSING


@pytest.fixture
async def watcher() -> AsyncIterator[Watcher]:
    fake = Watcher()
    application = web.Application()
    application.router.add_get(PATH_NOTICE, fake.answer)
    async with TestServer(application) as server, aiohttp.ClientSession() as session:
        url = str(server.make_url("")).rstrip("/")
        fake.client = NoticeClient(session, url, clock=lambda: fake.clock)
        fake.client.expect(watcher_mark("proof"))
        following = asyncio.create_task(fake.client.follow(fake.received.put_nowait))
        yield fake
        following.cancel()


async def test_notices_are_believed_from_the_watcher_that_has_marked_the_node_alone(watcher: Watcher) -> None:
    """An impostor answers first, on the watcher's port. Later the watcher does."""
    await watcher.says("0")
    false = NoticeList(revision="1", notices=(NOTICE,), proof="guess")
    for impostor in (false, false.model_copy(update={"proof": None})):
        watcher.notices = impostor
        await watcher.is_doubted("can't prove that it is the watcher that has marked the node")
    assert watcher.received.empty()
    watcher.notices = true = false.model_copy(update={"proof": "proof"})
    async with asyncio.timeout(10):
        assert await watcher.received.get() == true
    assert watcher.client.watch.state is WatchState.WATCHED


async def test_nobody_is_believed_on_a_node_that_no_watcher_has_marked(watcher: Watcher) -> None:
    await watcher.says("0")
    watcher.client.expect("")
    watcher.notices = NoticeList(revision="1", notices=(NOTICE,), proof="")
    await watcher.is_doubted("no watcher has marked the node")
    assert watcher.received.empty()


async def test_a_watcher_with_nothing_new_to_say_is_believed_again(watcher: Watcher) -> None:
    await watcher.says("0")
    watcher.client.expect("")
    await watcher.is_doubted("no watcher has marked the node")
    watcher.client.expect(watcher_mark("proof"))
    assert (await watcher.says("0")).state is WatchState.WATCHED
    said, watcher.notices = watcher.notices, None
    await watcher.is_doubted("does not answer: 503")
    watcher.notices = said
    assert (await watcher.says("0")).state is WatchState.WATCHED


async def test_a_watcher_in_trouble_takes_back_only_what_it_repeats_as_cancelled(watcher: Watcher) -> None:
    """It has just restarted, and reaches one of its sources before the other."""

    async def received(notices: NoticeList) -> tuple[Notice, ...]:
        watcher.notices = notices.model_copy(update={"proof": "proof"})
        async with asyncio.timeout(10):
            return (await watcher.received.get()).notices

    other = NOTICE.model_copy(update={"id": "2"})
    cancelled = other.model_copy(update={"cancelled": True})
    assert await received(NoticeList(revision="1", notices=(NOTICE, other))) == (NOTICE, other)
    assert await received(NoticeList(revision="2", trouble=BLIND, starting=True)) == (NOTICE, other)
    assert await received(NoticeList(revision="3", trouble=BLIND, notices=(cancelled,))) == (cancelled, NOTICE)
    assert await received(NoticeList(revision="4")) == ()
    assert await received(NoticeList(revision="5", trouble=BLIND)) == ()


async def test_nobody_is_asked_before_the_operator_has_said_who_is_believed() -> None:
    """Of two agents, it has said so to one."""
    asked: asyncio.Queue[str] = asyncio.Queue()

    async def answer(request: web.Request) -> web.Response:
        asked.put_nowait(request.headers["User-Agent"])
        return web.Response(status=503)

    application = web.Application()
    application.router.add_get(PATH_NOTICE, answer)
    async with (
        TestServer(application) as server,
        aiohttp.ClientSession(headers={"User-Agent": "waiting"}) as first,
        aiohttp.ClientSession(headers={"User-Agent": "assigned"}) as second,
    ):
        url = str(server.make_url("")).rstrip("/")
        waiting, assigned = NoticeClient(first, url), NoticeClient(second, url)
        following = [asyncio.create_task(client.follow(lambda _: None)) for client in (waiting, assigned)]
        assigned.expect(watcher_mark("proof"))
        assert [await asked.get() for _ in range(3)] == ["assigned"] * 3
        for task in following:
            task.cancel()


async def test_a_node_without_a_watcher_and_one_that_comes(watcher: Watcher) -> None:
    watcher.clock = 7.0
    for _ in range(2):
        await watcher.refused.get()
    missing = watcher.client.watch
    assert (missing.state, missing.seconds) == (WatchState.MISSING, 7.0)
    assert missing.trouble is not None
    assert "does not answer: 503" in missing.trouble
    watched = await watcher.says("1")
    assert watched == NodeWatch(state=WatchState.WATCHED)


async def test_the_seconds_count_from_the_change_of_the_state_alone(watcher: Watcher) -> None:
    await watcher.says("1")
    watcher.clock = 10.0
    assert await watcher.says("2", BLIND) == NodeWatch(state=WatchState.BLIND, trouble=BLIND)
    watcher.clock = 25.0
    again = "EC2's metadata service gives no usable answer: timeout."
    assert await watcher.says("3", again) == NodeWatch(state=WatchState.BLIND, seconds=15.0, trouble=again)
    assert (await watcher.says("4")).state is WatchState.WATCHED
    assert watcher.client.watch.seconds == 0.0
    watcher.notices = None
    await watcher.refused.get()
    await watcher.refused.get()
    assert watcher.client.watch.state is WatchState.MISSING


async def test_a_watcher_that_waits_for_its_clouds_first_answer_is_not_blind(watcher: Watcher) -> None:
    first = "Azure's metadata server has not answered yet."
    assert await watcher.says("1", first, starting=True) == NodeWatch(state=WatchState.STARTING, trouble=first)
    watcher.clock = 150.0
    late = await watcher.says("2", BLIND)
    assert (late.state, late.seconds) == (WatchState.BLIND, 0.0), "from here on it is blind"


async def test_a_watcher_that_knows_no_cloud_is_reported(watcher: Watcher) -> None:
    for revision, hears_cloud in (("1", False), ("2", True)):
        watcher.notices = NoticeList(revision=revision, hears_cloud=hears_cloud)
        async with asyncio.timeout(10):
            while (await watcher.received.get()).revision != revision:
                pass
        assert watcher.client.watch.hears_cloud is hears_cloud
        assert watcher.client.watch.state is WatchState.WATCHED


async def test_another_programs_answer_is_no_watchers(watcher: Watcher) -> None:
    watcher.body = "<html>" + "x" * 10_000 + "\x00</html>"
    async with asyncio.timeout(10):
        while "validation error" not in str(watcher.client.watch.trouble):  # noqa: ASYNC110
            await asyncio.sleep(0.01)
    trouble = watcher.client.watch.trouble
    assert watcher.client.watch.state is WatchState.MISSING
    assert trouble is not None
    assert trouble.isprintable()
    assert len(trouble) <= 300
