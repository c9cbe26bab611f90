"""What an agent logs while its operator doesn't answer.

It says so once, then ever less often, and says when the operator is back.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path

import aiohttp
import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer

from control_folder import control_folder
from spottrain_agent import routes
from spottrain_agent.control_address import ControlAddress
from spottrain_agent.control_client import HELD_SECONDS, MAX_LOG_AGAIN_SECONDS, ControlClient, Outage
from spottrain_agent.ports import bind
from spottrain_agent.routes import DirectRoute
from spottrain_api.contract.assignments import AgentReport, Assignment, AssignmentAction
from spottrain_api.contract.names import PATH_ASSIGNMENT, PATH_REPORT

REPORT = AgentReport(pod="gpt-1", pod_uid="u", rendezvous_port=1, sent_at=datetime(2026, 1, 1, tzinfo=UTC))


@dataclass(slots=True)
class Operator:
    """Answers with `status`, to reports after `seconds`.

    `client` asks it, by the time of `clock`. It holds polls if `has_news` is not set.
    """

    status: int = 503
    sentence: bytes | None = None
    seconds: float = 0.0
    clock: float = 0.0
    has_news: asyncio.Event = field(default_factory=asyncio.Event)
    polls: asyncio.Queue[str] = field(default_factory=asyncio.Queue)
    url: str = ""
    folder: Path = field(init=False)
    client: ControlClient = field(init=False)

    async def report(self, _: web.Request) -> web.Response:
        await asyncio.sleep(self.seconds)
        return web.Response(status=self.status, body=self.sentence, content_type="text/html")

    async def assignment(self, request: web.Request) -> web.Response:
        status = self.status
        await self.polls.put(request.query["after"])
        if status == 200:
            await self.has_news.wait()
        answer = Assignment(action=AssignmentAction.WAIT).to_json() if status == 200 else ""
        return web.Response(status=status, text=answer)


@pytest.fixture
async def operator(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> AsyncIterator[Operator]:
    caplog.set_level(logging.INFO, "spottrain_agent")
    fake = Operator()
    application = web.Application()
    application.router.add_post(PATH_REPORT, fake.report)
    application.router.add_get(PATH_ASSIGNMENT, fake.assignment)
    async with TestServer(application) as server, aiohttp.ClientSession() as session:
        fake.url = str(server.make_url("")).rstrip("/")
        fake.folder = control_folder(tmp_path, fake.url)
        fake.client = ControlClient(session, fake.folder, None, clock=lambda: fake.clock)
        yield fake


def said(caplog: pytest.LogCaptureFixture) -> list[tuple[str, str]]:
    return [(record.levelname, record.getMessage()) for record in caplog.records]


async def test_an_outage_is_reported_once_then_ever_less_often(
    operator: Operator, caplog: pytest.LogCaptureFixture
) -> None:
    logged_at = []
    for second in range(0, 600, 5):
        operator.clock = second
        before = len(caplog.records)
        assert not await operator.client.send_report(REPORT)
        logged_at += [second] * (len(caplog.records) - before)
    assert logged_at == [0, 60, 180, 420]
    level, message = said(caplog)[1]
    assert level == "WARNING"
    assert message.startswith(f"The operator at {operator.url} has not answered for 60 s: 503")
    assert "Check that the operator's pod is ready" in message


async def test_its_end_is_reported_and_the_next_one_begins_anew(
    operator: Operator, caplog: pytest.LogCaptureFixture
) -> None:
    for second, status in ((0, 200), (1, 503), (2, 503), (7, 200), (8, 200), (9, 503)):
        operator.clock, operator.status = second, status
        assert await operator.client.send_report(REPORT) is (status == 200)
    assert [level for level, _ in said(caplog)] == ["WARNING", "INFO", "WARNING"]
    assert said(caplog)[1][1] == f"The operator at {operator.url} answers again, after 6 s."


async def test_polls_are_watched_too(operator: Operator, caplog: pytest.LogCaptureFixture) -> None:
    received: asyncio.Queue[Assignment] = asyncio.Queue()
    async with asyncio.timeout(20):
        following = asyncio.create_task(operator.client.follow_assignments(received.put_nowait))
        for _ in range(2):
            await operator.polls.get()
        operator.status = 200
        operator.has_news.set()
        await received.get()
        following.cancel()
    assert [level for level, _ in said(caplog)] == ["WARNING", "INFO"]


async def test_an_operator_that_holds_the_poll_and_takes_reports_is_back(
    operator: Operator, caplog: pytest.LogCaptureFixture
) -> None:
    """A poll without news is answered minutes later."""
    async with asyncio.timeout(20):
        following = asyncio.create_task(operator.client.follow_assignments(lambda _: None))
        await operator.polls.get()
        operator.status = 200
        await operator.polls.get()
        for operator.clock in (HELD_SECONDS, HELD_SECONDS + 1.0):
            assert [level for level, _ in said(caplog)] == ["WARNING"]
            assert await operator.client.send_report(REPORT)
        following.cancel()
    assert said(caplog)[1:] == [("INFO", f"The operator at {operator.url} answers again, after 6 s.")]


async def test_a_slow_operator_gets_more_time_with_each_report(
    operator: Operator, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Agents that give up and ask anew would keep it slow."""
    monkeypatch.setattr(routes, "FIRST_REPORT_SECONDS", 0.01)
    operator.status, operator.seconds = 200, 1.0
    async with aiohttp.ClientSession() as session:
        route = DirectRoute(session, ControlAddress(operator.folder), None)
        for _ in range(6):  # 0.32 s at last
            with pytest.raises(TimeoutError):
                await route.report(REPORT)
        operator.seconds = 0.0
        await route.report(REPORT)
        operator.seconds = 1.0
        with pytest.raises(TimeoutError):
            await route.report(REPORT)
        monkeypatch.setattr(routes, "MAX_REPORT_SECONDS", 0.02)
        operator.seconds = 0.5
        for _ in range(3):
            with pytest.raises(TimeoutError):
                await route.report(REPORT)


def test_it_is_over_when_nothing_fails_any_more(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "spottrain_agent")
    outage = Outage("http://operator:8080", clock=lambda: 0.0)
    for path in (PATH_REPORT, PATH_ASSIGNMENT):
        outage.failed(path, TimeoutError())
    outage.succeeded(PATH_REPORT)
    assert [level for level, _ in said(caplog)] == ["WARNING"]
    assert "at http://operator:8080 does not answer: TimeoutError." in said(caplog)[0][1]
    outage.succeeded(PATH_ASSIGNMENT)
    assert [level for level, _ in said(caplog)] == ["WARNING", "INFO"]


def test_the_intervals_are_bounded(caplog: pytest.LogCaptureFixture) -> None:
    now = 0.0
    outage = Outage("http://operator:8080", clock=lambda: now)
    logged_at = []
    for hour in range(48):
        now = hour * MAX_LOG_AGAIN_SECONDS
        before = len(caplog.records)
        outage.failed(PATH_REPORT, TimeoutError())
        logged_at += [hour] * (len(caplog.records) - before)
    assert logged_at == list(range(48))


async def test_an_operator_that_refuses_does_not_seem_to_restart(operator: Operator, tmp_path: Path) -> None:
    with bind("127.0.0.1") as deaf:
        address = f"http://127.0.0.1:{deaf.getsockname()[1]}"
        async with aiohttp.ClientSession() as session:
            restarting = ControlClient(session, control_folder(tmp_path / "deaf", address), None)
            assert not await restarting.send_report(REPORT)
            assert restarting.operator_restarts
    answers = ((503, True), (413, False), (503, True), (401, False), (503, True), (200, False))
    for operator.status, restarts in answers:
        await operator.client.send_report(REPORT)
        assert operator.client.operator_restarts is restarts


async def test_a_refused_report_is_no_outage(operator: Operator, caplog: pytest.LogCaptureFixture) -> None:
    for operator.clock, operator.status in ((0, 503), (1, 400), (30, 413), (61, 400), (70, 200)):
        assert await operator.client.send_report(REPORT) is (operator.status == 200)
    (_, outage), (_, answers), (level, first), (_, again), (_, end) = said(caplog)
    assert "does not answer: 503" in outage
    assert answers == f"The operator at {operator.url} answers again, after 1 s."
    assert level == "WARNING"
    assert first.startswith(f"The operator at {operator.url} refuses this pod's reports: 400: Bad Request. The ranks")
    assert "an operator and a trainer image of the same version" in first
    assert "NetworkPolicy" not in first
    assert again.startswith(f"The operator at {operator.url} refuses this pod's reports for 60 s: 400")
    assert end == f"The operator at {operator.url} accepts this pod's reports again, after 69 s."


async def test_an_error_page_in_another_encoding_is_an_outage_as_any_other(
    operator: Operator, caplog: pytest.LogCaptureFixture
) -> None:
    operator.sentence = "Service indisponible, réessayez".encode("latin-1")
    assert not await operator.client.send_report(REPORT)
    ((_, outage),) = said(caplog)
    assert "does not answer: 503: Service indisponible, r\ufffdessayez" in outage


async def test_a_refused_report_ends_no_poll(operator: Operator) -> None:
    """Otherwise, the operator sees the agent come and go."""
    operator.status = 200
    lost: list[None] = []
    async with asyncio.timeout(20):
        following = asyncio.create_task(operator.client.follow_assignments(lambda _: None, lambda: lost.append(None)))
        await operator.polls.get()
        for operator.status in (400, 413, 400):  # the end of a poll would show while the next report is sent
            assert not await operator.client.send_report(REPORT)
        assert not lost
        following.cancel()
