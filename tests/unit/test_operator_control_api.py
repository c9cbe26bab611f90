"""The control API over real HTTP.

The tests show who may speak, for whom, and when a held poll ends.
"""

from __future__ import annotations

import asyncio
import gc
import logging
from collections.abc import AsyncIterator
from datetime import UTC, datetime, timedelta
from pathlib import Path

import aiohttp
import pytest
from aiohttp import web
from aiohttp.test_utils import TestClient, TestServer

from control_api_setup import AUTHORIZED, EXIT, JOB, NOW, POD, TOKEN, WAIT, Setup, report, served
from control_folder import control_folder
from pod_tokens import pod_token
from raw_requests import answer as raw_answer
from spottrain_agent.control_client import ControlClient
from spottrain_api.contract.assignments import Assignment, AssignmentAction
from spottrain_api.contract.clocks import clock_offset
from spottrain_api.contract.configuration import DrainRequest
from spottrain_api.contract.names import TOKEN_AUDIENCE
from spottrain_operator.control_api.agents import DEAD_BEFORE_CLOSED_SECONDS, ReportBox
from spottrain_operator.control_api.observability import metrics_application
from spottrain_operator.control_api.server import REFUSALS_BURST
from spottrain_operator.kube.errors import ClusterError
from spottrain_operator.kube.identities import PodIdentity


@pytest.fixture
async def setup() -> AsyncIterator[Setup]:
    async with served() as setup:
        yield setup


async def num_waiting(reports: ReportBox, number: int) -> None:
    async with asyncio.timeout(5):
        while reports.num_present != number:  # noqa: ASYNC110 - there is no event for it
            await asyncio.sleep(0)


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
async def test_without_a_good_token_nothing_is_answered(setup: Setup, headers: dict[str, str], sentence: str) -> None:
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
    await num_waiting(setup.reports, 1)
    setup.board.publish(JOB, {POD.uid: EXIT})
    answer = await poll
    assert Assignment.from_json(await answer.read()) == EXIT


async def test_a_poll_that_is_held_keeps_no_body_of_the_answer_before(setup: Setup) -> None:
    setup.board.publish(JOB, {POD.uid: WAIT})
    answer = await setup.client.get("/v1/assignment", headers=AUTHORIZED)
    assert Assignment.from_json(await answer.read()) == WAIT
    url = f"/v1/assignment?wait=60&after={WAIT.revision}"
    poll = asyncio.create_task(setup.client.get(url, headers=AUTHORIZED))
    await num_waiting(setup.reports, 1)
    responses = [each for each in gc.get_objects() if issubclass(type(each), web.Response)]
    bodies = [each.body for each in responses if each.headers.get("ETag") == answer.headers["ETag"]]
    assert bodies == [None], "aiohttp keeps the answer"
    poll.cancel()


async def test_nothing_new_is_204(setup: Setup) -> None:
    setup.board.publish(JOB, {POD.uid: WAIT})
    answer = await setup.client.get("/v1/assignment", params={"after": WAIT.revision}, headers=AUTHORIZED)
    assert answer.status == 204
    assert setup.reports.num_present == 0


async def test_a_pod_that_is_not_the_operators_is_refused_without_a_review(setup: Setup) -> None:
    stranger = PodIdentity(namespace="team", pod="mine", uid="uid-9")
    token = pod_token(stranger)
    setup.cluster.tokens[token, TOKEN_AUDIENCE] = stranger
    headers = {"Authorization": f"Bearer {token}"}
    data = report(pod="mine", pod_uid="uid-9").to_json()
    answer = await setup.client.post("/v1/report", data=data, headers=headers)
    assert answer.status == 403
    assert "the operator has no pod mine (uid-9) of a TrainingJob" in await answer.text()
    assert (await setup.client.get("/v1/assignment", headers=headers)).status == 403
    assert (setup.reviews.num, setup.woken) == (0, [])


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


async def test_who_does_not_lead_answers_nothing_even_at_the_end_of_a_held_poll(setup: Setup) -> None:
    setup.board.publish(JOB, {POD.uid: WAIT})
    poll = asyncio.create_task(
        setup.client.get("/v1/assignment", params={"after": WAIT.revision}, headers=AUTHORIZED)
    )
    await num_waiting(setup.reports, 1)
    setup.ready = False
    setup.board.publish(JOB, {POD.uid: EXIT})
    assert (await poll).status == 503
    assert (await setup.client.get("/readyz")).status == 503
    assert (await setup.client.get("/healthz")).status == 200


async def test_reviews_are_remembered(setup: Setup) -> None:
    for _ in range(3):
        await setup.client.post("/v1/report", data=report().to_json(), headers=AUTHORIZED)
    assert setup.reviews.num == 1


async def test_a_token_that_cannot_be_checked_is_no_refusal(setup: Setup) -> None:
    setup.reviews.error = ClusterError("connection refused")
    answer = await setup.client.post("/v1/report", data=report().to_json(), headers=AUTHORIZED)
    assert answer.status == 503
    assert answer.headers["Retry-After"] == "1"


def contact(setup: Setup) -> float:
    """Seconds since the agent was last known to be there."""
    [view] = setup.reports.of(frozenset({POD.uid})).values()
    return setup.clock - (view.last_contact - NOW).total_seconds()


async def test_an_agent_is_there_as_long_as_it_holds_a_poll(setup: Setup) -> None:
    setup.board.publish(JOB, {POD.uid: WAIT})
    setup.reports.put(POD, report())
    poll = f"/v1/assignment?wait=60&after={WAIT.revision}"
    polling = asyncio.create_task(setup.client.get(poll, headers=AUTHORIZED))
    await num_waiting(setup.reports, 1)
    setup.clock = 100.0
    assert contact(setup) == 0.0
    polling.cancel()
    await num_waiting(setup.reports, 0)
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
    await asyncio.sleep(0)
    setup.board.publish(JOB, {f"uid-{n}": EXIT for n in range(50)})
    assert await asyncio.gather(*polls) == [EXIT] * 50


async def test_an_agent_takes_a_drains_deadline_by_its_own_clock(setup: Setup, tmp_path: Path) -> None:
    request = DrainRequest(reason="Edit", requested_at=NOW, deadline=NOW + timedelta(seconds=50))
    told = Assignment(action=AssignmentAction.DRAIN, drain=request)
    setup.board.publish(JOB, {POD.uid: told})
    (tmp_path / "token").write_text(TOKEN)
    heard: asyncio.Queue[Assignment] = asyncio.Queue()
    async with aiohttp.ClientSession() as session, asyncio.timeout(10):
        control = ControlClient(session, control_folder(tmp_path, setup.client.make_url("")), tmp_path / "token")
        following = asyncio.create_task(control.follow_assignments(heard.put_nowait))
        drain = (await heard.get()).drain
        assert drain is not None
        assert 40 < (drain.deadline - datetime.now(UTC)).total_seconds() < 55
        assert drain.deadline - drain.requested_at == timedelta(seconds=50)
        await num_waiting(setup.reports, 1)  # it has the revision that it was told
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


async def test_an_authorization_that_is_no_text_is_refused_at_metrics(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "token").write_text("secret")
    async with TestServer(metrics_application(lambda: (b"", "text/plain"), tmp_path / "token")) as server:
        assert server.port is not None
        asked = b"GET /metrics HTTP/1.0\r\nHost: a\r\nAuthorization: \xff\r\n\r\n"
        assert (await raw_answer(server.port, asked)).startswith(b"HTTP/1.0 401")
    assert not caplog.records
