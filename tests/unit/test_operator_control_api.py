"""The control API over real HTTP.

The tests show who may speak, for whom, and when a held poll ends.
"""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from pathlib import Path

import aiohttp
import pytest
from aiohttp import web
from aiohttp.test_utils import TestClient, TestServer

from memory_cluster import MemoryCluster
from pod_tokens import pod_token
from spottrain_agent.control_client import ControlClient
from spottrain_api.contract import (
    REPORT_SECONDS,
    REPORT_SECONDS_HEADER,
    TOKEN_AUDIENCE,
    AgentPhase,
    AgentReport,
    Assignment,
    AssignmentAction,
    CommitRef,
    DrainRequest,
    Failure,
    FailureReason,
    Notice,
    Progress,
    clock_offset,
)
from spottrain_operator.cluster.client import ClusterError, JobKey, PodIdentity
from spottrain_operator.control_api.agents import (
    DEAD_BEFORE_CLOSED_SECONDS,
    AssignmentBoard,
    ReportBox,
)
from spottrain_operator.control_api.cluster_keys import ClusterKeys
from spottrain_operator.control_api.observability import metrics_application
from spottrain_operator.control_api.report_bounds import parse_report
from spottrain_operator.control_api.server import REFUSALS_BURST, ControlApi
from spottrain_operator.core.model import ReportView

NOW = datetime(2026, 1, 1, tzinfo=UTC)
JOB = JobKey(namespace="team", name="gpt")
POD = PodIdentity(namespace="team", pod="gpt-1", uid="uid-1")
TOKEN = pod_token(POD)
RENEWED_TOKEN = pod_token(POD, name="renewed")
AUTHORIZED = {"Authorization": f"Bearer {TOKEN}"}
AUTHORIZED_ANEW = {"Authorization": f"Bearer {RENEWED_TOKEN}"}
WAIT = Assignment(action=AssignmentAction.WAIT)
EXIT = Assignment(action=AssignmentAction.EXIT)
TRAINING = {"generation": 1, "step": 1, "updated_at": NOW}


@dataclass
class Reviewer:
    """Counts what reaches the API server, and can be down."""

    cluster: MemoryCluster
    num_reviews: int = 0
    down: bool = False
    held: asyncio.Event | None = None
    """The next review doesn't end before it is set."""

    async def review_token(self, token: str, *, audience: str) -> PodIdentity | None:
        self.num_reviews += 1
        held, self.held = self.held, None
        if held is not None:
            await held.wait()
        if self.down:
            raise ClusterError("connection refused")
        return await self.cluster.review_token(token, audience=audience)


@dataclass
class Setup:
    client: TestClient[web.Request, web.Application]
    board: AssignmentBoard
    reports: ReportBox
    reviewer: Reviewer
    woken: list[tuple[JobKey, bool]] = field(default_factory=list)
    ready: bool = True
    clock: float = 0.0


@pytest.fixture
async def setup() -> AsyncIterator[Setup]:
    cluster = MemoryCluster()
    cluster.tokens[TOKEN, TOKEN_AUDIENCE] = cluster.tokens[RENEWED_TOKEN, TOKEN_AUDIENCE] = POD
    reviewer = Reviewer(cluster)
    board = AssignmentBoard()
    woken: list[tuple[JobKey, bool]] = []
    result: Setup
    reports = ReportBox(
        lambda job, urgent: woken.append((job, urgent)), now=lambda: NOW + timedelta(seconds=result.clock)
    )
    reports.keep(JOB, frozenset({POD.uid}))
    api = ControlApi(
        reviewer=reviewer,
        keys=ClusterKeys(cluster),
        board=board,
        reports=reports,
        is_ready=lambda: result.ready,
        now=lambda: NOW + timedelta(seconds=result.clock),
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
        ({"Authorization": "Bearer stolen"}, "isn't one that Kubernetes bound to a pod"),
        ({"Authorization": f"Bearer {pod_token(POD, name='forged')}"}, "isn't valid"),
        (
            {"Authorization": f"Bearer {pod_token(POD, audience='vault')}"},
            "for the audience 'vault', not 'spottrain'",
        ),
        ({"Authorization": f"Bearer {pod_token(POD, seconds=-600)}"}, "the token expired "),
    ],
    ids=["none", "other scheme", "not a token", "unknown", "other audience", "expired"],
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


async def test_a_pod_that_is_not_the_operators_is_refused_without_a_review(setup: Setup) -> None:
    stranger = PodIdentity(namespace="team", pod="mine", uid="uid-9")
    token = pod_token(stranger)
    setup.reviewer.cluster.tokens[token, TOKEN_AUDIENCE] = stranger
    headers = {"Authorization": f"Bearer {token}"}
    data = report(pod="mine", pod_uid="uid-9").to_json()
    answer = await setup.client.post("/v1/report", data=data, headers=headers)
    assert answer.status == 403
    assert "the operator has no pod mine (uid-9) of a TrainingJob" in await answer.text()
    assert (await setup.client.get("/v1/assignment", headers=headers)).status == 403
    assert (setup.reviewer.num_reviews, setup.woken) == (0, [])


async def test_a_pod_that_is_deleted_is_refused_though_its_token_lives_on(setup: Setup) -> None:
    data = report().to_json()
    assert (await setup.client.post("/v1/report", data=data, headers=AUTHORIZED)).status == 204
    setup.reports.keep(JOB, frozenset())
    answer = await setup.client.post("/v1/report", data=data, headers=AUTHORIZED)
    assert answer.status == 403
    assert "is deleted" in await answer.text()
    assert setup.reports.of(frozenset({POD.uid})) == {}


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


async def test_a_report_is_kept_under_the_reviewed_uid_and_wakes_the_job(setup: Setup) -> None:
    answer = await setup.client.post("/v1/report", data=report().to_json(), headers=AUTHORIZED)
    assert answer.status == 204
    assert setup.reports.of(frozenset({POD.uid}))[POD.uid].report == report()
    assert setup.woken == [(JOB, False)]


async def held_report(setup: Setup) -> tuple[asyncio.Task[aiohttp.ClientResponse], asyncio.Event]:
    """A report of generation 1, whose token is under review."""
    held = setup.reviewer.held = asyncio.Event()
    body = report(generation=1).to_json()
    late = asyncio.create_task(setup.client.post("/v1/report", data=body, headers=AUTHORIZED))
    async with asyncio.timeout(5):
        while setup.reviewer.num_reviews < 1:  # noqa: ASYNC110 - there is no event for it
            await asyncio.sleep(0)
    return late, held


async def test_a_report_tells_of_the_time_at_which_it_came(setup: Setup) -> None:
    """Otherwise, a lost member seems to have reported after its peers failed."""
    late, held = await held_report(setup)
    setup.clock = 4.0
    held.set()
    assert (await late).status == 204
    assert setup.reports.of(frozenset({POD.uid}))[POD.uid].received_at == NOW


async def test_a_report_that_was_overtaken_changes_nothing(setup: Setup) -> None:
    late, held = await held_report(setup)
    setup.clock = 1.0
    newer = await setup.client.post("/v1/report", data=report(generation=2).to_json(), headers=AUTHORIZED_ANEW)
    assert newer.status == 204
    held.set()
    assert (await late).status == 204
    assert setup.reports.of(frozenset({POD.uid}))[POD.uid].report.generation == 2


async def test_a_report_about_another_pod_is_forbidden(setup: Setup) -> None:
    about_another = report(pod="gpt-2", pod_uid="uid-2")
    answer = await setup.client.post("/v1/report", data=about_another.to_json(), headers=AUTHORIZED)
    assert answer.status == 403
    assert "speaks for pod gpt-1" in await answer.text()
    assert setup.reports.of(frozenset({"uid-2", POD.uid})) == {}


IN_TRAINING = {"generation": 1, "step": 7, "updatedAt": "2026-01-01T00:00:00Z"}
HELD = {"generation": 1, "sequence": 1, "step": 1, "worldSize": 1}


def sent(**changes: object) -> str:
    return json.dumps(report().model_dump(mode="json", by_alias=True, exclude_none=True) | changes)


@pytest.mark.parametrize(
    ("body", "status", "sentence"),
    [
        ('{"pod": "gpt-1"}', 400, "not an agent report: podUid: Field required"),
        (b"\xff\xfe", 400, "not an agent report: body: Invalid JSON"),
        (b" " * 10 * 2**20, 413, "the report is larger than 256 KiB"),
        (sent(progress=IN_TRAINING | {"step": -7}), 400, "not an agent report: step: -7 is negative"),
        (sent(progress=IN_TRAINING | {"loss": float("nan")}), 400, "progress.loss: Input should be a finite number"),
        (sent(progress=IN_TRAINING | {"step": 10**30}), 400, "not an agent report: step: the number is too large"),
        (sent(progress=IN_TRAINING | {"checkpointInterval": "x" * 5000}), 400, "5000 characters, of at most 4000"),
        (sent(held=[{**HELD, "ranks": list(range(2000))}]), 400, "ranks: 2000 items, of at most 1024"),
        (sent(progress=IN_TRAINING | {"milestones": {"a": "9999-01-01T00:00:00Z"}}), 400, "the year 9999"),
        (
            report(pod="gpt-2", pod_uid="uid-2").to_json(),
            403,
            "speaks for pod gpt-1 (uid-1), the report is about gpt-2",
        ),
    ],
    ids=[
        *("a field lacks", "not JSON", "10 MB", "negative", "NaN", "too large", "a long text", "a long list"),
        *("a date", "another pod"),
    ],
)
async def test_a_bad_report_gets_a_sentence_and_nothing_is_lost(
    setup: Setup, body: str | bytes, status: int, sentence: str
) -> None:
    good = report(progress=TRAINING)
    assert (await setup.client.post("/v1/report", data=good.to_json(), headers=AUTHORIZED)).status == 204
    answer = await setup.client.post("/v1/report", data=body, headers=AUTHORIZED)
    assert answer.status == status
    assert sentence in await answer.text()
    assert setup.reports.of(frozenset({POD.uid, "uid-2"})) == {POD.uid: ReportView(report=good, received_at=NOW)}


def test_an_exceptions_text_is_cut_so_that_its_report_is_taken() -> None:
    long = report(failure=Failure(reason=FailureReason.SCRIPT_ERROR, message="x" * 10**6, exit_code=-9))
    parsed = parse_report(long.to_json().encode())
    assert parsed.failure is not None
    assert parsed.failure.message == "x" * 4000


async def test_reviews_are_remembered(setup: Setup) -> None:
    for _ in range(3):
        await setup.client.post("/v1/report", data=report().to_json(), headers=AUTHORIZED)
    assert setup.reviewer.num_reviews == 1


async def test_a_token_that_cannot_be_checked_is_no_refusal(setup: Setup) -> None:
    setup.reviewer.down = True
    answer = await setup.client.post("/v1/report", data=report().to_json(), headers=AUTHORIZED)
    assert answer.status == 503
    assert answer.headers["Retry-After"] == "1"


async def test_progress_alone_wakes_nobody(setup: Setup) -> None:
    for step in range(50):
        progress = Progress(generation=1, step=step, first_step_at=NOW, updated_at=NOW, step_seconds=0.5)
        setup.reports.put(POD, report(progress=progress, step_age_seconds=0.1 * (step % 20)))
    assert setup.woken == [(JOB, False)], "the first one was news"


async def test_a_notice_is_urgent(setup: Setup) -> None:
    notice = Notice(id="n", node="node-1", source="ec2", deadline=NOW, observed_at=NOW)
    setup.reports.put(POD, report())
    setup.reports.put(POD, report(notices=(notice,)))
    setup.reports.put(POD, report(notices=(notice,), warm=True))
    assert [urgent for _, urgent in setup.woken] == [False, True, False]


def contact(setup: Setup) -> float:
    """Seconds since the agent was last known to be there."""
    [view] = setup.reports.of(frozenset({POD.uid})).values()
    return setup.clock - (view.last_contact - NOW).total_seconds()


async def test_an_agent_is_there_as_long_as_it_holds_a_poll(setup: Setup) -> None:
    setup.board.publish(JOB, {POD.uid: WAIT})
    setup.reports.put(POD, report())
    poll = f"/v1/assignment?wait=60&after={WAIT.revision}"
    polling = asyncio.create_task(setup.client.get(poll, headers=AUTHORIZED))
    await num_waiting(setup.board, 1)
    setup.clock = 100.0
    assert contact(setup) == 0.0
    polling.cancel()
    async with asyncio.timeout(5):
        while setup.board.num_waiting:  # noqa: ASYNC110 - there is no event for it
            await asyncio.sleep(0)
    assert setup.woken[-1] == (JOB, True), "it may be lost"
    assert contact(setup) == DEAD_BEFORE_CLOSED_SECONDS
    setup.clock = 103.0
    assert contact(setup) == 3.0 + DEAD_BEFORE_CLOSED_SECONDS
    setup.reports.put(POD, report())
    assert contact(setup) == 0.0


async def test_a_poll_that_was_answered_is_no_loss(setup: Setup) -> None:
    setup.board.publish(JOB, {POD.uid: WAIT})
    setup.reports.put(POD, report())
    setup.clock = 7.0
    answer = await setup.client.get("/v1/assignment", headers=AUTHORIZED)
    assert answer.status == 200
    assert contact(setup) == 0.0
    assert setup.woken == [(JOB, False)]


@pytest.mark.parametrize(("wait", "status"), [("0", 204), ("0.01", 204), ("soon", 400)])
async def test_a_poll_is_held_for_as_long_as_the_agent_asks(setup: Setup, wait: str, status: int) -> None:
    setup.board.publish(JOB, {POD.uid: WAIT})
    answer = await setup.client.get(f"/v1/assignment?after={WAIT.revision}&wait={wait}", headers=AUTHORIZED)
    assert answer.status == status


async def test_agents_are_told_how_seldom_they_may_report(setup: Setup) -> None:
    answer = await setup.client.post("/v1/report", data=report().to_json(), headers=AUTHORIZED)
    assert float(answer.headers[REPORT_SECONDS_HEADER]) == REPORT_SECONDS


COMMIT = CommitRef(generation=1, step=5, manifest="m", committed_at=NOW)


@pytest.mark.parametrize(
    ("changes", "decisive"),
    [
        ({"phase": AgentPhase.FAILED}, True),
        ({"warm": True}, True),
        ({"commit": COMMIT}, True),
        ({"rendezvous_port": 4321}, True),
        ({"progress": TRAINING | {"first_step_at": NOW}}, True),
        ({"progress": TRAINING | {"step": 2}}, False),
        ({"sent_at": datetime(2027, 1, 1, tzinfo=UTC)}, False),
    ],
    ids=["phase", "warm", "commit", "port", "first step", "another step", "nothing"],
)
def test_what_matters(changes: dict[str, object], decisive: bool) -> None:
    before = {"progress": TRAINING}
    assert (report(**before).news != report(**(before | changes)).news) is decisive


async def test_metrics_are_served_to_anyone_on_a_port_of_their_own(setup: Setup) -> None:
    def exposition() -> tuple[bytes, str]:
        return b"metrics", "text/plain; version=0.0.4; charset=utf-8"

    async with TestClient(TestServer(metrics_application(exposition))) as client:
        answer = await client.get("/metrics")
        assert (answer.status, await answer.read()) == (200, b"metrics")
        assert (await client.get("/v1/assignment")).status == 404
    assert (await setup.client.get("/metrics")).status == 404


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
    (tmp_path / "token").write_text(TOKEN)
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


async def test_a_flood_does_not_fill_the_log(setup: Setup, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "spottrain_operator")
    for _ in range(3 * REFUSALS_BURST):
        assert (await setup.client.get("/v1/assignment", headers={"Authorization": "Bearer bogus"})).status == 401
    assert REFUSALS_BURST <= len(caplog.records) <= REFUSALS_BURST + 1
    assert (
        "GET /v1/assignment from 127.0.0.1: the token isn't one that Kubernetes bound to a pod" in caplog.messages[0]
    )


async def test_the_agents_log_has_the_operators_sentence(
    setup: Setup, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "token").write_text(TOKEN)
    async with aiohttp.ClientSession() as session:
        control = ControlClient(session, str(setup.client.make_url("")).rstrip("/"), tmp_path / "token")
        assert not await control.send_report(report(pod="gpt-2"))
    assert "403: this token speaks for pod gpt-1 (uid-1), the report is about gpt-2" in caplog.text


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
