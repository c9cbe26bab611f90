"""Reports of agents to the control API, over real HTTP.

The tests show which reports are taken, what each changes, and whom it wakes.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from datetime import UTC, datetime, timedelta
from pathlib import Path

import aiohttp
import pytest

from control_api_setup import AUTHORIZED, AUTHORIZED_ANEW, JOB, NOW, POD, TOKEN, Setup, report, running, served
from control_folder import control_folder
from spottrain_agent.control_client import ControlClient
from spottrain_api.contract.assignments import AgentPhase
from spottrain_api.contract.names import REPORT_SECONDS_HEADER
from spottrain_api.contract.notices import Notice
from spottrain_api.contract.reports import CommitRef, Failure, FailureReason, Progress
from spottrain_operator.control_api import server
from spottrain_operator.control_api.agents import LeastDelay, ReportBox
from spottrain_operator.control_api.report_bounds import parse_report
from spottrain_operator.core.model import ReportView
from spottrain_operator.kube.identities import PodIdentity

TRAINING = {"generation": 1, "step": 1, "updated_at": NOW}


@pytest.fixture
async def setup() -> AsyncIterator[Setup]:
    async with served() as setup:
        yield setup


async def test_a_report_is_kept_under_the_reviewed_uid_and_wakes_the_job(setup: Setup) -> None:
    answer = await setup.client.post("/v1/report", data=report().to_json(), headers=AUTHORIZED)
    assert answer.status == 204
    assert setup.reports.of(frozenset({POD.uid}))[POD.uid].report == report()
    assert setup.woken == [(JOB, False)]


async def held_report(setup: Setup) -> tuple[asyncio.Task[aiohttp.ClientResponse], asyncio.Event]:
    """A report of generation 1, whose token is under review."""
    held = setup.reviews.answers = asyncio.Event()
    body = report(generation=1).to_json()
    late = asyncio.create_task(setup.client.post("/v1/report", data=body, headers=AUTHORIZED))
    async with asyncio.timeout(5):
        while setup.reviews.num < 1:  # noqa: ASYNC110 - there is no event for it
            await asyncio.sleep(0)
    setup.reviews.answers = None  # others don't wait
    return late, held


async def test_a_report_has_the_time_at_which_it_came(setup: Setup) -> None:
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
        (b" " * 10 * 2**20, 413, "the report is larger than 384 KiB"),
        (sent(progress=IN_TRAINING | {"step": -7}), 400, "not an agent report: step: -7 is negative"),
        (sent(progress=IN_TRAINING | {"loss": float("nan")}), 400, "progress.loss: Input should be a finite number"),
        (sent(progress=IN_TRAINING | {"step": 10**30}), 400, "not an agent report: step: the number is too large"),
        (sent(progress=IN_TRAINING | {"checkpointInterval": "x" * 5000}), 400, "5000 characters, of at most 4000"),
        (sent(held=[{**HELD, "ranks": list(range(2000))}]), 400, "ranks: 2000 items, of at most 1024"),
        (sent(held=[{**HELD, "ranks": [1] * 1000}] * 90), 400, "not an agent report: more than 32000 values"),
        (sent(progress=IN_TRAINING | {"milestones": {"a": "9999-01-01T00:00:00Z"}}), 400, "the year 9999"),
        (
            sent(progress=IN_TRAINING | {"lastStepAt": "2026-01-01T00:00:00"}),
            400,
            "lastStepAt: Input should have time",
        ),
        (
            report(pod="gpt-2", pod_uid="uid-2").to_json(),
            403,
            "speaks for pod gpt-1 (uid-1), the report is about gpt-2",
        ),
    ],
    ids=[
        *("a field lacks", "not JSON", "10 MB", "negative", "NaN", "too large", "a long text", "a long list"),
        *("many long lists", "a date", "no zone", "another pod"),
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


@pytest.mark.parametrize("hours_off", [-1, 0, 1])
def test_a_report_is_as_late_as_it_is_later_than_the_fastest_one(hours_off: int) -> None:
    """Whatever the agent's clock shows."""
    reports = ReportBox(lambda _job, urgent: None)
    sender = PodIdentity(namespace="team", pod=POD.pod, uid=POD.uid)
    latencies = []
    for number, seconds in enumerate((2.0, 0.5, 5.5, 0.5)):
        made = NOW + timedelta(seconds=10 * number)
        late = report(number=number, sent_at=made + timedelta(hours=hours_off))
        assert reports.put(sender, late, received_at=made + timedelta(seconds=seconds))
        view = reports.of(frozenset({POD.uid}))[POD.uid]
        latencies.append(view.latency)
        assert view.made_at == view.received_at - timedelta(seconds=view.latency)
    assert latencies == [0.0, 0.0, 5.0, 0.0]


@pytest.mark.parametrize(("ahead", "corrected"), [(-3600, 3600), (-60, 60), (2, 0), (60, -60), (3600, -3600)])
def test_the_times_of_ranks_are_corrected_by_what_their_clock_is_off(ahead: int, corrected: int) -> None:
    """A clock that is a little off is taken for right, as all reports take a moment."""
    reports = ReportBox(lambda _job, urgent: None)
    moments = ("first_step_at", "last_step_at", "updated_at", "drain_seen_at")
    for number, delay in enumerate((0.1, 0.1, 90.0)):
        sent = NOW + timedelta(seconds=100 * number)
        shown = sent + timedelta(seconds=ahead)
        progress = TRAINING | dict.fromkeys(moments, shown) | {"milestones": {"started": shown}}
        told = report(number=number, sent_at=shown, progress=progress)
        assert reports.put(POD, told, received_at=sent + timedelta(seconds=delay))
        view = reports.of(frozenset({POD.uid}))[POD.uid]
        kept = view.report
        right = shown + timedelta(seconds=corrected)
        assert kept.progress is not None
        assert {getattr(kept.progress, name) for name in moments} == {right}
        assert (kept.progress.milestones["started"], kept.sent_at) == (right, right)
        assert view.clock_offset == right - shown


@pytest.mark.parametrize("hours", [8, -8])
def test_reports_are_as_old_as_before_once_the_operators_clock_is_set(hours: int) -> None:
    """Also one that was on its way. How far agents' clocks are off is new, too."""
    now, jump = [NOW], timedelta(hours=hours)
    reports = ReportBox(lambda _job, urgent: None, now=lambda: now[0])
    reports.keep(JOB, frozenset({POD.uid}))

    def ages(sent_at: datetime, received_at: datetime | None = None) -> tuple[timedelta, timedelta]:
        progress = TRAINING | {"last_step_at": sent_at, "updated_at": sent_at}
        assert reports.put(POD, report(sent_at=sent_at, progress=progress), received_at=received_at)
        return found()

    def found() -> tuple[timedelta, timedelta]:
        view = reports.of(frozenset({POD.uid}))[POD.uid]
        assert view.report.progress is not None
        assert view.report.progress.last_step_at is not None
        return now[0] - view.last_contact, now[0] - view.report.progress.last_step_at

    assert ages(NOW) == (timedelta(), timedelta())
    now[0] += timedelta(seconds=4)
    came_at = now[0]
    now[0] += jump
    reports.shift(jump)
    assert found() == (timedelta(seconds=4), timedelta(seconds=4))
    assert ages(now[0], received_at=came_at) == (timedelta(), timedelta())
    now[0] += timedelta(seconds=4)
    assert ages(now[0]) == (timedelta(), timedelta())


def test_a_clock_that_was_set_back_counts_anew_within_hours() -> None:
    delay = LeastDelay()
    found = [
        delay.with_report(60.0 * (hours > 1), NOW + timedelta(hours=hours)) for hours in (0, 1, 1.1, 2, 2.2, 3.3)
    ]
    assert found == [0, 0, 0, 0, 60, 60]


def test_an_exceptions_text_is_cut_so_that_its_report_is_taken() -> None:
    long = report(failure=Failure(reason=FailureReason.SCRIPT_ERROR, message="x" * 10**6, exit_code=-9))
    parsed = parse_report(long.to_json().encode())
    assert parsed.failure is not None
    assert parsed.failure.message == "x" * 4000


def test_an_exceptions_text_that_is_not_utf_8_can_be_reported() -> None:
    """Names of files may have halves of surrogate pairs."""
    failure = Failure(reason=FailureReason.SCRIPT_ERROR, message="no \udcff.pt\0")
    parsed = parse_report(report(failure=failure).to_json().encode())
    assert parsed.failure is not None
    assert parsed.failure.message == "no ?.pt "


def test_a_report_has_no_commands_for_the_terminals_that_show_it() -> None:
    failure = Failure(reason=FailureReason.SCRIPT_ERROR, message="", exit_code=1)
    progress = Progress(generation=1, step=1, first_step_at=NOW, updated_at=NOW)
    told = json.loads(report(failure=failure, progress=progress).to_json())
    told["failure"]["message"], told["progress"]["message"] = "\x1b[2Jno\tfile\nhere\x9b", "\x1b]0;mine\x07"
    parsed = parse_report(json.dumps(told).encode())
    assert parsed.failure is not None
    assert parsed.progress is not None
    assert parsed.failure.message == " [2Jno\tfile\nhere "
    assert parsed.progress.message == " ]0;mine "


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


@pytest.mark.parametrize(("node_rank", "seconds"), [(None, 45.0), (0, 45.0), (1, 240.0)])
async def test_agents_are_assigned_how_seldom_they_may_report(
    setup: Setup, node_rank: int | None, seconds: float
) -> None:
    if node_rank is not None:
        setup.board.publish(JOB, {POD.uid: running(1, node_rank)})
    answer = await setup.client.post("/v1/report", data=report().to_json(), headers=AUTHORIZED)
    assert float(answer.headers[REPORT_SECONDS_HEADER]) == seconds


@pytest.mark.parametrize(("node_rank", "seconds"), [(0, 2.0), (1, 240.0)])
async def test_progress_is_reported_as_often_as_it_is_recorded(node_rank: int, seconds: float) -> None:
    """A local cluster records it every two seconds."""
    async with served(record_interval=2.0) as setup:
        setup.board.publish(JOB, {POD.uid: running(1, node_rank)})
        answer = await setup.client.post("/v1/report", data=report().to_json(), headers=AUTHORIZED)
        assert float(answer.headers[REPORT_SECONDS_HEADER]) == seconds


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


async def test_the_agents_log_has_the_operators_sentence(
    setup: Setup, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "token").write_text(TOKEN)
    async with aiohttp.ClientSession() as session:
        control = ControlClient(session, control_folder(tmp_path, setup.client.make_url("")), tmp_path / "token")
        assert not await control.send_report(report(pod="gpt-2"))
    assert "403: this token speaks for pod gpt-1 (uid-1), the report is about gpt-2" in caplog.text


async def test_a_pod_whose_reports_take_too_long_waits_and_others_do_not(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server, "WORK_BURST", 0.0)
    monkeypatch.setattr(server, "WORK_PER_SECOND", 0.0)
    other = PodIdentity(namespace=POD.namespace, pod="gpt-2", uid="uid-2")
    async with served(other) as setup:
        first = await setup.client.post("/v1/report", data="no report", headers=AUTHORIZED)
        second = await setup.client.post("/v1/report", data=report().to_json(), headers=AUTHORIZED)
        headers = {"Authorization": f"Bearer {setup.tokens[other.uid]}"}
        of_other = report(pod=other.pod, pod_uid=other.uid).to_json()
        third = await setup.client.post("/v1/report", data=of_other, headers=headers)
        assert (first.status, second.status, third.status) == (400, 429, 204)
        assert second.headers["Retry-After"] == "1"
        assert (
            "the reports of pod gpt-1 take more of the operator's time than those of any agent" in await second.text()
        )
