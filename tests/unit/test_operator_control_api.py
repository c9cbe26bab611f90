"""The control API over real HTTP.

The tests show who may speak, for whom, and when a held poll ends.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from pathlib import Path

import aiohttp
import pytest
from aiohttp import web
from aiohttp.test_utils import TestClient, TestServer

from memory_cluster import MemoryCluster
from spottrain_agent.control_client import ControlClient
from spottrain_api.contract import (
    TOKEN_AUDIENCE,
    AgentPhase,
    AgentReport,
    Assignment,
    AssignmentAction,
    CommitRef,
    DrainRequest,
    Progress,
    clock_offset,
)
from spottrain_operator.cluster.client import ClusterError, JobKey, PodIdentity
from spottrain_operator.control_api.agents import AssignmentBoard, ReportBox, matters
from spottrain_operator.control_api.server import ControlApi

NOW = datetime(2026, 1, 1, tzinfo=UTC)
JOB = JobKey(namespace="team", name="gpt")
POD = PodIdentity(namespace="team", pod="gpt-1", uid="uid-1")
AUTHORIZED = {"Authorization": "Bearer secret-1"}
WAIT = Assignment(action=AssignmentAction.WAIT)
EXIT = Assignment(action=AssignmentAction.EXIT)


@dataclass
class Reviewer:
    """Counts what reaches the API server, and can be down."""

    cluster: MemoryCluster
    num_reviews: int = 0
    down: bool = False

    async def review_token(self, token: str, *, audience: str) -> PodIdentity | None:
        self.num_reviews += 1
        if self.down:
            raise ClusterError("connection refused")
        return await self.cluster.review_token(token, audience=audience)


@dataclass
class Setup:
    client: TestClient[web.Request, web.Application]
    board: AssignmentBoard
    reports: ReportBox
    reviewer: Reviewer
    woken: list[JobKey] = field(default_factory=list)
    ready: bool = True
    standby: bool = False
    clock: float = 0.0


@pytest.fixture
async def setup() -> AsyncIterator[Setup]:
    cluster = MemoryCluster()
    cluster.tokens["secret-1", TOKEN_AUDIENCE] = POD
    reviewer = Reviewer(cluster)
    board = AssignmentBoard()
    woken: list[JobKey] = []
    result: Setup
    reports = ReportBox(woken.append, clock=lambda: result.clock, now=lambda: NOW)
    api = ControlApi(
        reviewer=reviewer,
        board=board,
        reports=reports,
        is_ready=lambda: result.ready,
        is_standby=lambda: result.standby,
        metrics=lambda: (b"metrics", "text/plain; version=0.0.4; charset=utf-8"),
        now=lambda: NOW,
        long_poll_seconds=0.2,
    )
    async with TestClient(TestServer(api.application())) as client:
        result = Setup(client, board, reports, reviewer, woken)
        yield result


async def num_waiting(board: AssignmentBoard, number: int) -> None:
    async with asyncio.timeout(5):
        while board.num_waiting < number:  # noqa: ASYNC110 - there is no event for it
            await asyncio.sleep(0)


def report(**changes: object) -> AgentReport:
    values = {"pod": POD.pod, "pod_uid": POD.uid, "rendezvous_port": 1234, "sent_at": NOW} | changes
    return AgentReport.model_validate(values)


@pytest.mark.parametrize(
    ("headers", "sentence"),
    [
        ({}, "no token"),
        ({"Authorization": "Basic c2VjcmV0"}, "no token"),
        ({"Authorization": "Bearer stolen"}, "isn't valid"),
    ],
    ids=["none", "other scheme", "unknown"],
)
async def test_without_a_good_token_nothing_is_told(setup: Setup, headers: dict[str, str], sentence: str) -> None:
    setup.board.publish(JOB, {POD.uid: WAIT})
    answer = await setup.client.get("/v1/assignment", headers=headers)
    assert answer.status == 401
    assert sentence in await answer.text()


async def test_a_published_assignment_is_answered_at_once(setup: Setup) -> None:
    setup.board.publish(JOB, {POD.uid: WAIT})
    answer = await setup.client.get("/v1/assignment", headers=AUTHORIZED)
    assert answer.status == 200
    assert Assignment.from_json(await answer.read()) == WAIT


async def test_a_poll_is_held_until_the_assignment_changes(setup: Setup) -> None:
    setup.board.publish(JOB, {POD.uid: WAIT})
    poll = asyncio.create_task(
        setup.client.get("/v1/assignment", params={"after": WAIT.revision}, headers=AUTHORIZED)
    )
    await num_waiting(setup.board, 1)
    setup.board.publish(JOB, {POD.uid: EXIT})
    answer = await poll
    assert Assignment.from_json(await answer.read()) == EXIT


async def test_nothing_new_is_204(setup: Setup) -> None:
    setup.board.publish(JOB, {POD.uid: WAIT})
    answer = await setup.client.get("/v1/assignment", params={"after": WAIT.revision}, headers=AUTHORIZED)
    assert answer.status == 204
    assert setup.board.num_waiting == 0


async def test_a_pod_that_nobody_published_for_waits(setup: Setup) -> None:
    """A new operator that hasn't looked yet must not tell a training pod to wait."""
    answer = await setup.client.get("/v1/assignment", params={"after": "before-restart"}, headers=AUTHORIZED)
    assert answer.status == 204


async def test_pods_that_a_job_no_longer_has_are_forgotten(setup: Setup) -> None:
    setup.board.publish(JOB, {POD.uid: WAIT})
    setup.board.publish(JOB, {})
    answer = await setup.client.get("/v1/assignment", headers=AUTHORIZED)
    assert answer.status == 204


async def test_who_does_not_lead_tells_nothing_even_at_the_end_of_a_held_poll(setup: Setup) -> None:
    setup.board.publish(JOB, {POD.uid: WAIT})
    poll = asyncio.create_task(
        setup.client.get("/v1/assignment", params={"after": WAIT.revision}, headers=AUTHORIZED)
    )
    await num_waiting(setup.board, 1)
    setup.ready = False
    setup.board.publish(JOB, {POD.uid: EXIT})
    assert (await poll).status == 503
    assert (await setup.client.get("/readyz")).status == 503
    assert (await setup.client.get("/healthz")).status == 200


async def test_who_could_take_over_is_ready_but_answers_no_agent(setup: Setup) -> None:
    setup.ready, setup.standby = False, True
    assert (await setup.client.get("/readyz")).status == 200
    assert (await setup.client.get("/v1/assignment", headers=AUTHORIZED)).status == 503
    assert (await setup.client.post("/v1/report", data=report().to_json(), headers=AUTHORIZED)).status == 503


async def test_a_report_is_kept_under_the_reviewed_uid_and_wakes_the_job(setup: Setup) -> None:
    answer = await setup.client.post("/v1/report", data=report().to_json(), headers=AUTHORIZED)
    assert answer.status == 204
    assert setup.reports.of(frozenset({POD.uid}))[POD.uid].report == report()
    assert setup.woken == [JOB]


async def test_a_report_about_another_pod_is_forbidden(setup: Setup) -> None:
    about_another = report(pod="gpt-2", pod_uid="uid-2")
    answer = await setup.client.post("/v1/report", data=about_another.to_json(), headers=AUTHORIZED)
    assert answer.status == 403
    assert "speaks for pod gpt-1" in await answer.text()
    assert setup.reports.of(frozenset({"uid-2", POD.uid})) == {}


async def test_what_is_not_a_report_is_refused_with_the_field(setup: Setup) -> None:
    answer = await setup.client.post("/v1/report", data='{"pod": "gpt-1"}', headers=AUTHORIZED)
    assert answer.status == 400
    assert "podUid" in await answer.text()


async def test_a_body_without_end_is_refused(setup: Setup) -> None:
    answer = await setup.client.post("/v1/report", data=b"x" * 1_000_000, headers=AUTHORIZED)
    assert answer.status == 413


async def test_reviews_are_remembered(setup: Setup) -> None:
    for _ in range(3):
        await setup.client.post("/v1/report", data=report().to_json(), headers=AUTHORIZED)
    assert setup.reviewer.num_reviews == 1


async def test_a_token_that_cannot_be_checked_is_no_refusal(setup: Setup) -> None:
    setup.reviewer.down = True
    answer = await setup.client.post("/v1/report", data=report().to_json(), headers=AUTHORIZED)
    assert answer.status == 503
    assert answer.headers["Retry-After"] == "1"


async def test_progress_alone_wakes_at_a_bounded_rate(setup: Setup) -> None:
    def at_step(step: int) -> AgentReport:
        return report(progress=Progress(generation=1, step=step, first_step_at=NOW, updated_at=NOW))

    for tenth in range(51):
        setup.clock = tenth / 10
        setup.reports.put(POD, at_step(tenth))
    assert len(setup.woken) == 3  # at 0, 2 and 4 seconds


COMMIT = CommitRef(generation=1, step=5, manifest="m", committed_at=NOW)
TRAINING = {"generation": 1, "step": 1, "updated_at": NOW}


@pytest.mark.parametrize(
    ("changes", "decisive"),
    [
        ({"phase": AgentPhase.FAILED}, True),
        ({"warm": True}, True),
        ({"commit": COMMIT}, True),
        ({"rendezvous_port": 4321}, True),
        ({"progress": TRAINING | {"first_step_at": NOW}}, True),
        ({"progress": TRAINING}, False),
        ({"sent_at": datetime(2027, 1, 1, tzinfo=UTC)}, False),
    ],
    ids=["phase", "warm", "commit", "port", "first step", "another step", "nothing"],
)
def test_what_matters(changes: dict[str, object], decisive: bool) -> None:
    assert matters(report(), report(**changes)) is decisive


async def test_metrics_are_served_to_anyone(setup: Setup) -> None:
    answer = await setup.client.get("/metrics")
    assert (answer.status, await answer.read()) == (200, b"metrics")


async def test_many_agents_wait_side_by_side(setup: Setup) -> None:
    setup.board.publish(JOB, {f"uid-{n}": WAIT for n in range(50)})
    polls = [
        asyncio.create_task(setup.board.next(f"uid-{n}", after=WAIT.revision, timeout_seconds=5)) for n in range(50)
    ]
    await num_waiting(setup.board, 50)
    setup.board.publish(JOB, {f"uid-{n}": EXIT for n in range(50)})
    assert await asyncio.gather(*polls) == [EXIT] * 50


async def test_an_agent_takes_a_drains_deadline_by_its_own_clock(setup: Setup, tmp_path: Path) -> None:
    request = DrainRequest(reason="Edit", requested_at=NOW, deadline=NOW + timedelta(seconds=50))
    told = Assignment(action=AssignmentAction.DRAIN, drain=request)
    setup.board.publish(JOB, {POD.uid: told})
    (tmp_path / "token").write_text("secret-1")
    heard: asyncio.Queue[Assignment] = asyncio.Queue()
    async with aiohttp.ClientSession() as session, asyncio.timeout(10):
        control = ControlClient(session, str(setup.client.make_url("")), tmp_path / "token")
        following = asyncio.create_task(control.follow_assignments(heard.put_nowait))
        drain = (await heard.get()).drain
        assert drain is not None
        assert 40 < (drain.deadline - datetime.now(UTC)).total_seconds() < 55
        assert drain.deadline - drain.requested_at == timedelta(seconds=50)
        await num_waiting(setup.board, 1)  # it has the revision that it was told
        following.cancel()
    assert heard.empty()


@pytest.mark.parametrize(
    ("date", "seconds"),
    [
        ("Thu, 01 Jan 2026 00:00:00 GMT", 0),
        ("Wed, 31 Dec 2025 23:59:58 GMT", 0),
        ("Wed, 31 Dec 2025 22:00:01 GMT", 7200),
        ("Thu, 01 Jan 2026 00:02:00 GMT", -120),
        ("Thu, 01 Jan 2026 01:00:00 +0100", 0),
        ("Thu, 01 Jan 2026 00:00:00 -0000", 0),
        ("yesterday", 0),
        ("Fri, 31 Dec 9999 23:59:59 GMT", 0),
        (None, 0),
    ],
)
def test_the_offset_of_a_clock_is_that_of_the_answers_date(date: str | None, seconds: float) -> None:
    assert clock_offset(date, NOW) == timedelta(seconds=seconds)
