"""Three agents' contact with a real control API: node rank 0 relays the others."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import time
from collections.abc import AsyncIterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer

from control_api_setup import JOB, NOW, POD, Setup, running, served, until
from control_folder import control_folder
from spottrain_agent import relay as relay_module
from spottrain_agent import report_rhythm
from spottrain_agent.contact import Contact
from spottrain_agent.control_client import ControlClient
from spottrain_agent.routes import BEAT_SECONDS, RefusedError, RelayRoute, UnprovenError
from spottrain_api.contract.assignments import AgentPhase, AgentReport, Assignment, Relay, RelayAssignment
from spottrain_api.contract.configuration import DrainRequest
from spottrain_operator.kube.identities import PodIdentity

PODS = [POD, replace(POD, pod="gpt-2", uid="uid-2"), replace(POD, pod="gpt-3", uid="uid-3")]
UIDS = frozenset(pod.uid for pod in PODS)


@dataclass
class Member:
    """A pod's contact, and what it has received."""

    pod: PodIdentity
    control: ControlClient
    contact: Contact = field(init=False)
    task: asyncio.Task[None] | None = None
    phase: AgentPhase = AgentPhase.IDLE
    received: list[RelayAssignment] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.contact = Contact("127.0.0.1", self.report)

    def report(self) -> AgentReport:
        return AgentReport(
            pod=self.pod.pod, pod_uid=self.pod.uid, generation=1, phase=self.phase, rendezvous_port=1, sent_at=NOW
        )

    def start(self) -> None:
        self.task = asyncio.create_task(self.contact.keep(self.control, self.received.append))

    async def stop(self) -> None:
        """As if its process were killed: all connections end."""
        if self.task is not None:
            self.task.cancel()
            await asyncio.wait({self.task})

    def reports(self, phase: AgentPhase) -> None:
        self.phase = phase
        self.contact.report_soon()


@dataclass
class Job:
    """A generation of three members, whose operator is a real control API."""

    setup: Setup
    members: list[Member]

    def offered(self) -> Relay | None:
        """What the operator knows of node rank 0's relay."""
        view = self.setup.reports.of(UIDS).get(POD.uid)
        if view is None or view.report.relay_port is None or view.report.relay_token is None:
            return None
        return Relay(address=f"127.0.0.1:{view.report.relay_port}", token=view.report.relay_token)

    def publish(self, number: int = 1, **changes: Any) -> None:
        relay = self.offered()
        assignments = {
            pod.uid: running(number, rank, relay if rank else None, **changes) for rank, pod in enumerate(PODS)
        }
        self.setup.board.publish(JOB, assignments)

    def phases(self) -> list[AgentPhase | None]:
        views = self.setup.reports.of(UIDS)
        return [views[pod.uid].report.phase if pod.uid in views else None for pod in PODS]

    def relayed(self) -> int:
        """Number of members that are there without a connection to the operator."""
        return self.setup.reports.num_present - len(self.setup.reports._num_polls)

    async def until_relayed(self, number: int = 2) -> None:
        await until(lambda: (self.setup.reports.num_present, self.relayed()) == (3, number))


@pytest.fixture
async def job(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Job]:
    """A generation that runs, and whose peers are relayed and have no news."""
    monkeypatch.setattr(report_rhythm, "FIRST_PAUSE_SECONDS", 60.0)
    async with served(*PODS[1:]) as setup, contextlib.AsyncExitStack() as stack:
        members = []
        for pod in PODS:
            session = await stack.enter_async_context(aiohttp.ClientSession())
            token = tmp_path / pod.uid
            token.write_text(setup.tokens[pod.uid])
            control = control_folder(tmp_path / "control", setup.client.make_url(""))
            member = Member(pod, ControlClient(session, control, token, pod_uid=pod.uid))
            stack.push_async_callback(member.stop)
            members.append(member)
        world = Job(setup, members)
        for member in members:
            member.start()
        await until(lambda: world.offered() is not None)
        world.publish()
        await world.until_relayed()
        relay = members[0].contact._relay
        await until(lambda: relay._reports.keys() == UIDS - {POD.uid} and not (relay.has_news or relay._in_flight))
        yield world


async def test_one_connection_reports_all_members(job: Job) -> None:
    assert [len(member.received) for member in job.members] == [1, 1, 1]
    job.publish(watcher="mark")
    await until(lambda: all(member.received[-1].watcher == "mark" for member in job.members))
    for rank, member in enumerate(job.members):
        generation = member.received[-1].generation
        assert generation is not None
        assert generation.node_rank == rank
    assert job.relayed() == 2


async def test_a_peers_news_reach_the_operator_at_once(job: Job) -> None:
    begun = time.monotonic()
    job.members[1].reports(AgentPhase.FAILED)
    await until(lambda: job.phases()[1] is AgentPhase.FAILED)
    print(f"after {time.monotonic() - begun:.3f} s")
    assert job.relayed() == 2
    assert job.setup.woken[-1] == (JOB, True), "an end is urgent"


async def test_a_peer_that_ends_is_noticed_at_once(job: Job) -> None:
    job.setup.woken.clear()
    await job.members[2].stop()
    await until(lambda: job.setup.reports.num_present == 2)
    assert (JOB, True) in job.setup.woken


def test_a_peer_that_loses_its_power_is_given_up_within_three_seconds() -> None:
    relay = relay_module.RelayServer("127.0.0.1", lambda: None)
    with relay._socket as listener:
        listener.listen()
        with socket.create_connection(("127.0.0.1", relay.port)), listener.accept()[0] as connection:
            given_up = connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT)
    # Between two beats, nothing is sent that a peer could acknowledge.
    assert given_up / 1000 + BEAT_SECONDS <= 3


async def test_peers_go_to_the_operator_themselves_when_their_relay_ends(job: Job) -> None:
    await job.members[0].stop()
    await until(lambda: (job.setup.reports.num_present, job.relayed()) == (2, 0))
    job.publish(watcher="mark")
    await until(lambda: all(member.received[-1].watcher == "mark" for member in job.members[1:]))
    job.members[1].reports(AgentPhase.FAILED)
    await until(lambda: job.phases()[1] is AgentPhase.FAILED)


async def test_they_come_back_to_a_relay_that_does(job: Job) -> None:
    job.members[0].contact._relay.set_peers({})
    await until(lambda: (job.setup.reports.num_present, job.relayed()) == (3, 0))
    job.publish(watcher="mark")
    await job.until_relayed()


async def test_a_new_generation_comes_through_the_relay_of_the_last_one(job: Job) -> None:
    job.publish(number=2)
    await until(lambda: all(_number(member.received[-1]) == 2 for member in job.members))
    assert job.relayed() == 2


async def test_who_is_no_member_any_more_asks_the_operator(job: Job) -> None:
    assignments = {pod.uid: running(2, rank, job.offered() if rank else None) for rank, pod in enumerate(PODS[:2])}
    wait = Assignment.model_validate({"action": "wait"})
    job.setup.board.publish(JOB, assignments | {PODS[2].uid: wait})
    await until(lambda: job.members[2].received[-1] == RelayAssignment(**dict(wait)))
    await job.until_relayed(1)


async def test_a_new_operator_hears_of_all_from_node_rank_0(job: Job) -> None:
    reports = [member.contact.num_reports for member in job.members[1:]]
    job.setup.ready = False
    job.publish(watcher="mark")  # ends the poll
    await until(lambda: job.members[0].contact._relay._alone_since is not None)
    job.setup.reports.keep(JOB, frozenset())
    job.setup.board.publish(JOB, {})
    job.setup.reports.keep(JOB, UIDS)
    job.setup.ready = True
    job.setup.board.publish(JOB, {pod.uid: running(1, rank) for rank, pod in enumerate(PODS)})
    await until(lambda: None not in job.phases())
    await job.until_relayed()
    assert [member.contact.num_reports for member in job.members[1:]] == reports, "the peers noticed nothing"


async def test_peers_leave_a_relay_that_is_alone_for_long(job: Job, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(relay_module, "SILENT_OPERATOR_SECONDS", 0.0)
    job.members[0].contact._relay.sent(accepted=False)
    await until(lambda: job.relayed() == 0)


async def test_a_deadline_reaches_peers_by_their_own_clock(job: Job) -> None:
    """The operator's clock stands at NOW, years before that of the agents."""
    drain = DrainRequest(reason="Edit", requested_at=NOW, deadline=NOW)
    job.publish(drain=drain)
    await until(lambda: all(member.received[-1].drain is not None for member in job.members))
    deadlines = [member.received[-1].drain.deadline.timestamp() for member in job.members]  # type: ignore[union-attr]
    assert deadlines == pytest.approx([time.time()] * 3, abs=10)


def _number(assignment: Assignment) -> int:
    return assignment.generation.number if assignment.generation is not None else 0


# --- proofs, and relays that fail ----------------------------------------------------------------------------


async def test_the_relay_hears_only_who_knows_its_token(job: Job) -> None:
    relay = job.offered()
    assert relay is not None
    stranger = relay.model_copy(update={"token": "guessed"})
    async with aiohttp.ClientSession() as session:
        with pytest.raises(RefusedError, match="403: the request does not prove"):
            await RelayRoute(session, stranger, PODS[1].uid).poll("", 1)
        with pytest.raises(RefusedError, match="403"):
            await RelayRoute(session, stranger, PODS[1].uid).report(job.members[1].report())
        with pytest.raises(RefusedError, match="503: this agent has no such peer"):
            await RelayRoute(session, relay, "somebody").poll("", 1)
        assignment, _ = await RelayRoute(session, relay, PODS[1].uid).poll("", 1)
        assert assignment is not None
        assert assignment.revision == job.members[1].received[-1].revision


async def test_a_peer_believes_no_answer_that_is_not_proven(job: Job) -> None:
    """Somebody else answers at the relay's address."""
    answers = [b"\n\n0000\n{}", b"\n\n\n", running(1, 1).to_json().encode()]

    async def answer(_: web.Request) -> web.Response:
        return web.Response(body=answers.pop())

    application = web.Application()
    application.router.add_get("/v1/assignment", answer)
    async with TestServer(application) as server, aiohttp.ClientSession() as session:
        route = RelayRoute(session, Relay(address=f"127.0.0.1:{server.port}", token="t"), PODS[1].uid)
        for _ in range(len(answers)):
            with pytest.raises(UnprovenError):
                await route.poll("", 1)


async def test_a_recorded_answer_is_good_for_no_other_question(job: Job) -> None:
    relay = job.offered()
    assert relay is not None
    recorded: list[bytes] = []

    async def record(request: web.Request) -> web.Response:
        if not recorded:
            url = f"http://{relay.address}{request.rel_url}"
            async with aiohttp.ClientSession() as session, session.get(url, headers=request.headers) as answer:
                recorded.append(await answer.read())
        return web.Response(body=recorded[0])

    application = web.Application()
    application.router.add_get("/v1/assignment", record)
    async with TestServer(application) as server, aiohttp.ClientSession() as session:
        man_in_the_middle = relay.model_copy(update={"address": f"127.0.0.1:{server.port}"})
        route = RelayRoute(session, man_in_the_middle, PODS[1].uid)
        assert (await route.poll("", 1))[0] is not None
        with pytest.raises(UnprovenError):
            await route.poll("", 1)


async def test_no_token_crosses_the_wire_between_members(job: Job) -> None:
    tokens = [view.report.relay_token for view in job.setup.reports.of(UIDS).values()]
    relay = job.members[0].contact._relay
    said = b"".join(content for _, content in relay._peers.values())
    said += "".join(report.to_json() for report in relay._reports.values()).encode()
    assert len(tokens) == len(relay._reports) + 1 == 3
    assert not [token for token in tokens if token is None or token.encode() in said]


@pytest.mark.parametrize("failure", ["refuses", "hangs"])
async def test_a_peer_whose_relay_fails_is_with_the_operator_soon(job: Job, failure: str) -> None:
    """A stopped process still has its connections, which say nothing any more."""

    async def accept(_reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await asyncio.Event().wait() if failure == "hangs" else writer.close()

    peer = job.members[1]
    async with await asyncio.start_server(accept, "127.0.0.1", 0) as server:
        relay = Relay(address=f"127.0.0.1:{server.sockets[0].getsockname()[1]}", token="t")
        job.members[0].contact._relay.set_peers({})
        await until(lambda: (job.setup.reports.num_present, job.relayed()) == (3, 0))
        begun = time.monotonic()
        job.setup.board.publish(
            JOB, {pod.uid: running(1, rank, relay if rank else None, watcher="m") for rank, pod in enumerate(PODS)}
        )
        await until(lambda: peer.received[-1].relay == relay)
        peer.reports(AgentPhase.FAILED)
        await until(lambda: job.phases()[1] is AgentPhase.FAILED and job.relayed() == 0)
        took = time.monotonic() - begun
        print(f"after {took:.2f} s")
        assert took < 5.0
