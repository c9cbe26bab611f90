"""An agent's contact with its operator.

The agent notices that an operator is gone.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer

from control_folder import control_folder
from spottrain_agent import contact, report_rhythm
from spottrain_agent.control_client import ControlClient
from spottrain_agent.routes import DEFAULT_REPORT_SECONDS
from spottrain_api.contract.assignments import AgentReport
from spottrain_api.contract.names import PATH_ASSIGNMENT, PATH_REPORT, REPORT_SECONDS_HEADER

REPORT = AgentReport(pod="gpt-1", pod_uid="u", rendezvous_port=1, sent_at=datetime(2026, 1, 1, tzinfo=UTC))


@dataclass(slots=True)
class Operator:
    """An operator that holds each poll for as long as it is asked to.

    It answers reports with `headers` and `status`.
    """

    status: int = 204
    headers: dict[str, str] = field(default_factory=dict)
    polls: asyncio.Queue[float] = field(default_factory=asyncio.Queue)
    requests: asyncio.Queue[tuple[str, Any]] = field(default_factory=asyncio.Queue)
    client: ControlClient = field(init=False)

    async def report(self, request: web.Request) -> web.Response:
        await self._note(request)
        return web.Response(status=self.status, headers=self.headers)

    async def _note(self, request: web.Request) -> None:
        assert request.transport is not None
        await self.requests.put((request.path, request.transport.get_extra_info("peername")))

    async def assignment(self, request: web.Request) -> web.Response:
        await self._note(request)
        await self.polls.put(float(request.query["wait"]))
        await asyncio.sleep(float(request.query["wait"]))
        return web.Response(status=204)


@pytest.fixture
async def operator(tmp_path: Path) -> AsyncIterator[Operator]:
    fake = Operator()
    application = web.Application()
    application.router.add_post(PATH_REPORT, fake.report)
    application.router.add_get(PATH_ASSIGNMENT, fake.assignment)
    async with TestServer(application) as server, aiohttp.ClientSession() as session:
        fake.client = ControlClient(session, control_folder(tmp_path, server.make_url("")), None)
        yield fake


@pytest.mark.parametrize(
    ("header", "seconds"),
    [("30", 30.0), ("0.5", 0.5), (None, DEFAULT_REPORT_SECONDS), ("soon", DEFAULT_REPORT_SECONDS), ("0", 1.0)],
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


async def test_at_rest_reports_and_polls_take_turns_on_one_connection(
    operator: Operator, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(report_rhythm, "FIRST_PAUSE_SECONDS", 0.1)
    for name, seconds in (("EARLY_SECONDS", 0.2), ("IDLE_SECONDS", 0.3), ("REPORT_SECONDS", 0.8)):
        monkeypatch.setattr(contact, name, seconds)
    operator.headers = {REPORT_SECONDS_HEADER: "0.8"}
    agent = contact.Contact("127.0.0.1", lambda: REPORT)
    keeping = asyncio.create_task(agent.keep(operator.client, lambda _: None))
    turn = [PATH_ASSIGNMENT, PATH_REPORT]
    newest: deque[tuple[str, Any]] = deque(maxlen=6)
    async with asyncio.timeout(30):
        while True:
            newest.append(await operator.requests.get())
            paths, connections = zip(*newest, strict=True)
            if [*paths] == 3 * turn and len(set(connections)) == 1:
                break
    keeping.cancel()
    await asyncio.wait({keeping})
