"""An agent's contact with operators of this and of older releases.

The agent notices that an operator is gone.
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

from spottrain_agent.control_client import ControlClient
from spottrain_agent.routes import OLDER_REPORT_SECONDS
from spottrain_api.contract import PATH_ASSIGNMENT, PATH_REPORT, REPORT_SECONDS_HEADER, AgentReport

REPORT = AgentReport(pod="gpt-1", pod_uid="u", rendezvous_port=1, sent_at=datetime(2026, 1, 1, tzinfo=UTC))


@dataclass(slots=True)
class Operator:
    """An operator that holds each poll for as long as it is asked to.

    It answers reports with `headers` and `status`.
    """

    status: int = 204
    headers: dict[str, str] = field(default_factory=dict)
    polls: asyncio.Queue[float] = field(default_factory=asyncio.Queue)
    client: ControlClient = field(init=False)

    async def report(self, _: web.Request) -> web.Response:
        return web.Response(status=self.status, headers=self.headers)

    async def assignment(self, request: web.Request) -> web.Response:
        await self.polls.put(float(request.query["wait"]))
        await asyncio.sleep(float(request.query["wait"]))
        return web.Response(status=204)


@pytest.fixture
async def operator() -> AsyncIterator[Operator]:
    fake = Operator()
    application = web.Application()
    application.router.add_post(PATH_REPORT, fake.report)
    application.router.add_get(PATH_ASSIGNMENT, fake.assignment)
    async with TestServer(application) as server, aiohttp.ClientSession() as session:
        fake.client = ControlClient(session, str(server.make_url("")).rstrip("/"), None)
        yield fake


@pytest.mark.parametrize(
    ("header", "seconds"),
    [("30", 30.0), ("0.5", 0.5), (None, OLDER_REPORT_SECONDS), ("soon", OLDER_REPORT_SECONDS), ("0", 1.0)],
    ids=str,
)
async def test_the_operator_says_how_seldom_it_wants_reports(
    operator: Operator, header: str | None, seconds: float
) -> None:
    operator.headers = {} if header is None else {REPORT_SECONDS_HEADER: header}
    assert await operator.client.send_report(REPORT)
    assert operator.client.report_seconds == seconds


async def test_a_poll_is_repeated_once_a_report_has_failed(operator: Operator) -> None:
    """The operator's node may have lost its power, which ends no connection."""
    lost = asyncio.Event()
    following = asyncio.create_task(operator.client.follow_assignments(lambda _: None, lost.set))
    async with asyncio.timeout(10):
        assert await operator.polls.get() > 60
        assert await operator.client.send_report(REPORT)
        assert not lost.is_set(), "contact is kept"
        operator.status = 503
        assert not await operator.client.send_report(REPORT)
        await lost.wait()
        await operator.polls.get()
    following.cancel()
    await asyncio.wait({following})
