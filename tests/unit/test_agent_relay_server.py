"""A relay with one peer, without its own agent."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from dataclasses import dataclass
from datetime import datetime, timedelta, tzinfo

import aiohttp
import pytest

from control_api_setup import NOW, running, until
from raw_requests import answer
from scene import training
from spottrain_agent import relay as relay_module
from spottrain_agent import routes
from spottrain_agent.routes import RefusedError, RelayRoute
from spottrain_api.contract.assignments import AgentReport, Relay
from spottrain_api.contract.replicas import HeldShards
from spottrain_api.contract.reports import CommitRef, Failure, FailureReason, Progress
from spottrain_operator.control_api.report_bounds import MAX_BODY_BYTES, parse_report
from spottrain_runtime import http_server


@dataclass(frozen=True)
class Alone:
    """A relay with one peer, whose own agent never reports unless the test does.

    `asked` is set when there is something to report. `route` is the peer's way to it.
    """

    relay: relay_module.RelayServer
    asked: asyncio.Event
    serving: asyncio.Task[None]
    route: RelayRoute
    own: AgentReport
    peers: AgentReport


@pytest.fixture
async def alone() -> AsyncIterator[Alone]:
    asked = asyncio.Event()
    relay = relay_module.RelayServer("127.0.0.1", asked.set)
    relay.set_peers({"uid-2": running(1, 1)})
    asked.clear()
    serving = asyncio.create_task(relay.run())
    own = AgentReport(pod="gpt-1", pod_uid="uid-1", rendezvous_port=1, sent_at=NOW)
    peers = own.model_copy(update={"pod": "gpt-2", "pod_uid": "uid-2"})
    async with aiohttp.ClientSession() as session:
        route = RelayRoute(session, Relay(address=f"127.0.0.1:{relay.port}", token=relay.token), "uid-2")
        yield Alone(relay, asked, serving, route, own, peers)
    serving.cancel()
    await asyncio.wait({serving})


async def test_the_clocks_are_compared_when_a_poll_begins_to_be_held(
    alone: Alone, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its answer has the date of that time.

    A drain's deadline would otherwise be late by as long as it was held.
    """
    noted: list[datetime] = []

    class Clock(datetime):
        @classmethod
        def now(cls, tz: tzinfo | None = None) -> Clock:
            noted.append(super().now(tz) + timedelta(hours=len(noted)))
            return cls.fromtimestamp(noted[-1].timestamp(), tz)

    monkeypatch.setattr(routes, "datetime", Clock)
    polling = asyncio.create_task(alone.route.poll(running(1, 1).revision, 60.0))
    await until(lambda: bool(noted))
    assert not polling.done()
    alone.relay.set_peers({"uid-2": running(2, 1)})
    _, lead = await polling
    assert abs(lead) < timedelta(minutes=1)


async def test_an_operator_that_goes_while_it_takes_a_report_ends_no_relay(alone: Alone) -> None:
    """The poll ends first, and the report a moment later."""
    relay = alone.relay
    polling = asyncio.create_task(alone.route.poll(running(1, 1).revision, 60.0))
    reporting = asyncio.create_task(alone.route.report(alone.peers))
    await until(lambda: "uid-2" in relay.present and bool(relay._waiting))
    assert relay.filled(alone.own).peers == (alone.peers,)
    relay.lose_contact()
    relay.sent(accepted=False)
    with pytest.raises(RefusedError, match="503"):
        await reporting
    assert relay.filled(alone.own).peers == (), "the peer hands it to the operator itself"
    polling.cancel()


async def test_what_can_wait_goes_with_the_relays_own_next_report(alone: Alone) -> None:
    relay, news = alone.relay, alone.peers.model_copy(update={"number": 1})
    reporting = asyncio.create_task(alone.route.report(news))
    await until(lambda: relay.has_news)
    assert relay.filled(alone.own).peers == (news,)

    again = news.model_copy(update={"number": 2, "step_age_seconds": 5.0})
    repeating = asyncio.create_task(alone.route.report(again))
    await until(lambda: relay.has_news)
    relay.sent(accepted=True)
    assert relay.filled(alone.own).peers == (again,), "the operator had not taken the news yet"
    relay.sent(accepted=True)
    assert await reporting == await repeating > 0

    alone.asked.clear()
    for number in (3, 4):
        quiet = news.model_copy(update={"number": number})
        assert await alone.route.report(quiet) > 0
    assert not relay.has_news
    assert not alone.asked.is_set()
    assert relay.filled(alone.own).peers == (quiet,)
    assert relay.filled(alone.own).peers == ()

    commit = CommitRef(generation=1, step=50, manifest="attempts/g1/manifest-50.json", committed_at=NOW)
    committed = news.model_copy(update={"number": 5, "commit": commit})
    assert await alone.route.report(committed) > 0, "node rank 0 reports the commit itself"
    assert not alone.asked.is_set()
    assert relay.filled(alone.own).peers == (committed,)

    with relay._polling("uid-2"):
        relay.sent(accepted=False, restarts=True)
        relay.lose_contact()
        last = committed.model_copy(update={"number": 6, "commit": commit.model_copy(update={"step": 60})})
        assert await alone.route.report(last) > 0, "an operator has taken its news, and the next one will"
        assert relay.filled(alone.own).peers == (last,)


async def test_a_peer_is_there_between_two_polls_and_gone_if_it_does_not_ask_again(
    alone: Alone, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(relay_module, "BETWEEN_POLLS_SECONDS", 0.05)
    with alone.relay._polling("uid-2"):
        assert alone.relay.present == {"uid-2"}
    assert alone.relay.present == {"uid-2"}
    await until(lambda: not alone.relay.present)


async def test_a_batch_is_measured_in_bytes(alone: Alone) -> None:
    """The operator refuses one that is too large, and most letters have several."""
    report = AgentReport(
        **dict(alone.own) | {"failure": Failure(reason=FailureReason.SCRIPT_ERROR, message="損" * 4000)}
    )
    size = len(report.to_json().encode())
    reports = {f"uid-{n}": report.model_copy(update={"pod_uid": f"uid-{n}"}) for n in range(2, 40)}
    alone.relay._reports.update(reports)
    alone.relay._unsent.update(reports)
    body = alone.relay.filled(report).to_json().encode()
    assert relay_module.MAX_BATCH_BYTES - size < len(body) < relay_module.MAX_BATCH_BYTES + 2 * size < MAX_BODY_BYTES


@pytest.mark.parametrize("num_ranks", [1, 8, 64])
@pytest.mark.parametrize("progress", [None, training()], ids=["starting", "training"])
async def test_the_operator_takes_all_that_the_largest_job_says_at_once(
    alone: Alone, progress: Progress | None, num_ranks: int
) -> None:
    """It bounds the values of a report.

    A job has at most 512 members of 64 ranks, of which each holds two steps.
    """
    ranks = tuple(range(511 * num_ranks, 512 * num_ranks))
    step = HeldShards(generation=3, sequence=1, step=1, world_size=512 * num_ranks, ranks=ranks + ranks)
    report = AgentReport(
        **dict(alone.own)
        | {"replica_port": 1, "held": (step, step), "process": "0123456789abcdef", "progress": progress}
    )
    reports = {f"uid-{n}": report.model_copy(update={"pod_uid": f"uid-{n}"}) for n in range(2, 513)}
    alone.relay.set_peers(dict.fromkeys(reports, running(1, 1)))
    alone.relay._reports.update(reports)
    alone.relay._unsent.update(reports)
    sent = alone.relay.filled(report).model_copy(update={"present": tuple(reports)})
    assert parse_report(sent.to_json().encode()) == sent


async def test_a_relay_that_ends_answers_whoever_waits(alone: Alone, caplog: pytest.LogCaptureFixture) -> None:
    reporting = asyncio.create_task(alone.route.report(alone.peers))
    async with asyncio.timeout(10):
        await alone.asked.wait()
        alone.serving.cancel()
        with pytest.raises(RefusedError, match="503: node rank 0 can't report to the operator"):
            await reporting
    await asyncio.wait({alone.serving})
    assert not caplog.records


@pytest.mark.parametrize(
    ("attempts", "stay"),
    [
        ([(1, "silent"), (15, "silent")], True),
        ([(1, "silent"), (16, "silent")], False),
        ([(1, "refused"), (30, "refused"), (44, "silent")], True),
        ([(1, "refused"), (30, "refused"), (31, "silent"), (120, "silent")], True),
        ([(1, "silent"), (15, "refused"), (120, "silent")], True),
        ([(1, "refused"), (30, "refused"), (60, "refused"), (120, "refused")], True),
        ([(1, "refused"), (30, "refused"), (60, "refused"), (121, "refused")], False),
        ([(1, "silent"), (61, "taken")], True),
        ([(1, "refused"), (61, "taken"), (62, "silent"), (76, "silent")], True),
        ([(1, "refused"), (61, "taken"), (62, "silent"), (77, "silent")], False),
    ],
)
async def test_peers_stay_longer_in_a_restart(attempts: list[tuple[float, str]], *, stay: bool) -> None:
    """For 15 s of silence, and for two minutes of a restart."""
    now = 0.0
    relay = relay_module.RelayServer("127.0.0.1", lambda: None, lambda: now)
    with relay._socket:
        for now, outcome in attempts:  # noqa: B007 - the relay's clock
            relay.sent(accepted=outcome == "taken", restarts=outcome == "refused")
        assert relay._reaches_operator() is stay


async def test_half_a_request_is_not_held_nor_one_with_many_headers(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(http_server, "REQUEST_SECONDS", 0.1)
    relay = relay_module.RelayServer("127.0.0.1", lambda: None)
    serving = asyncio.create_task(relay.run())
    poll = b"GET /v1/assignment HTTP/1.1\r\nHost: a\r\n"
    report = b"POST /v1/report HTTP/1.0\r\nHost: a\r\nContent-Length: 9\r\n\r\nhalf"
    try:
        async with asyncio.timeout(20):
            assert await answer(relay.port, poll) == b""
            assert (await answer(relay.port, poll + b"A: b\r\n" * 40)).startswith(b"HTTP/1.0 400")
            assert await answer(relay.port, report) == b""
    finally:
        serving.cancel()
        await asyncio.wait({serving})
    assert not caplog.records


async def test_a_proof_that_is_no_text_is_refused_as_any_other(
    alone: Alone, caplog: pytest.LogCaptureFixture
) -> None:
    poll = b"GET /v1/assignment?pod=uid-2 HTTP/1.0\r\nHost: a\r\nSpottrain-Proof: %b\r\n\r\n"
    async with asyncio.timeout(20):
        for proof in (b"\xff x", b"x \xff"):
            assert (await answer(alone.relay.port, poll % proof)).startswith(b"HTTP/1.0 403")
    assert not caplog.records
