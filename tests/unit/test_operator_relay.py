"""What the operator takes from an agent that relays, and what it tells it."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from dataclasses import replace
from datetime import timedelta
from typing import Any

import pytest

from control_api_setup import AUTHORIZED, JOB, NOW, POD, WAIT, Setup, report, running, served
from scene import training_job
from spottrain_api.contract.assignments import (
    AgentPhase,
    AgentReport,
    Assignment,
    Relay,
    RelayAssignment,
    RelayReport,
)
from spottrain_operator.control_api.agents import DEAD_BEFORE_CLOSED_SECONDS
from spottrain_operator.core.assignments import assignment_for, relays_for
from spottrain_operator.core.timing import DEFAULT_TIMING
from spottrain_operator.kube.identities import PodIdentity

PEER = replace(POD, pod="gpt-2", uid="uid-2")
OTHER = replace(POD, pod="gpt-3", uid="uid-3")
STRANGER = PodIdentity(namespace="team", pod="bert-1", uid="uid-9")
RELAY = Relay(address="127.0.0.1:7", token="t")
GENERATION = {POD.uid: running(1, 0), PEER.uid: running(1, 1, RELAY), OTHER.uid: running(1, 2, RELAY)}


@pytest.fixture
async def setup() -> AsyncIterator[Setup]:
    async with served(PEER, OTHER, STRANGER) as setup:
        setup.board.publish(JOB, GENERATION)
        setup.board.publish(JOB._replace(name="bert"), {STRANGER.uid: running(1, 0)})
        yield setup


def of(pod: PodIdentity, **changes: object) -> AgentReport:
    return AgentReport(**dict(report(pod=pod.pod, pod_uid=pod.uid, **changes)))


async def send_own(setup: Setup, report: AgentReport) -> int:
    headers = {"Authorization": f"Bearer {setup.tokens[report.pod_uid]}"}
    return (await setup.client.post("/v1/report", data=report.to_json(), headers=headers)).status


async def send(setup: Setup, pod: PodIdentity = POD, *peers: AgentReport, present: tuple[str, ...] = ()) -> int:
    body = RelayReport(**dict(of(pod)) | {"peers": peers, "present": present}).to_json()
    headers = {"Authorization": f"Bearer {setup.tokens[pod.uid]}"}
    return (await setup.client.post("/v1/report", data=body, headers=headers)).status


def known(setup: Setup) -> dict[str, AgentReport]:
    everybody = frozenset(pod.uid for pod in (POD, PEER, OTHER, STRANGER))
    return {uid: view.report for uid, view in setup.reports.of(everybody).items()}


def silence(setup: Setup, pod: PodIdentity) -> float:
    view = setup.reports.of(frozenset({pod.uid}))[pod.uid]
    assert setup.reports.last_contact(pod.uid) == view.last_contact
    return setup.clock - (view.last_contact - NOW).total_seconds()


def polling(setup: Setup, pod: PodIdentity, after: str) -> asyncio.Task[Any]:
    headers = {"Authorization": f"Bearer {setup.tokens[pod.uid]}"}
    return asyncio.create_task(setup.client.get(f"/v1/assignment?wait=60&after={after}", headers=headers))


async def are_present(setup: Setup, number: int) -> None:
    async with asyncio.timeout(5):
        while setup.reports.num_present != number:  # noqa: ASYNC110 - there is no event for it
            await asyncio.sleep(0)


async def revision(setup: Setup) -> str:
    answer = await setup.client.get("/v1/assignment", headers=AUTHORIZED)
    return RelayAssignment.from_json(await answer.read()).revision


# --- assignments ---------------------------------------------------------------------------------------------


async def test_node_rank_0_hears_what_its_peers_are_assigned(setup: Setup) -> None:
    answer = await setup.client.get("/v1/assignment", headers=AUTHORIZED)
    told = RelayAssignment.from_json(await answer.read())
    assert told.peers == {uid: GENERATION[uid] for uid in (PEER.uid, OTHER.uid)}
    assert answer.headers["ETag"] == f'"{told.revision}"'


@pytest.mark.parametrize(
    "told",
    [WAIT, running(1, 1), running(2, 0)],
    ids=["waits", "is not node rank 0", "leads another generation"],
)
async def test_others_hear_of_themselves_alone(setup: Setup, told: Assignment) -> None:
    setup.board.publish(JOB, GENERATION | {POD.uid: told})
    answer = await setup.client.get("/v1/assignment", headers=AUTHORIZED)
    found = RelayAssignment.from_json(await answer.read())
    assert found.peers is None
    assert found.revision == told.revision


async def test_its_poll_ends_when_a_peers_assignment_changes(setup: Setup) -> None:
    poll = polling(setup, POD, await revision(setup))
    await are_present(setup, 1)
    changed = GENERATION | {PEER.uid: running(1, 1, RELAY, watcher="mark")}
    setup.board.publish(JOB, changed)
    told = RelayAssignment.from_json(await (await poll).read())
    assert (told.peers or {})[PEER.uid].watcher == "mark"


async def test_a_relay_that_becomes_known_ends_no_poll(setup: Setup) -> None:
    """A new operator learns of it by reports, while all agents hold polls."""
    poll = polling(setup, POD, await revision(setup))
    await are_present(setup, 1)
    setup.board.publish(JOB, {uid: told.model_copy(update={"relay": None}) for uid, told in GENERATION.items()})
    setup.board.publish(JOB, GENERATION | {POD.uid: running(1, 0, watcher="mark")})
    told = RelayAssignment.from_json(await (await poll).read())
    assert told.watcher == "mark"


def test_peers_get_the_relay_of_node_rank_0() -> None:
    scene = training_job().all_say(relay_port=7, relay_token="t")
    job, reports = scene.observed.job, scene.observed.reports
    generation = job.status.generation
    assert generation is not None
    first, *others = generation.members
    relay = Relay(address=f"{first.address}:7", token="t")
    assert relays_for(job, reports) == {member.pod_uid: relay for member in others}, "the first is the relay itself"
    without = {uid: view for uid, view in reports.items() if uid != first.pod_uid}
    assert relays_for(job, without) == {}, "an operator that has just started"
    relayed = training_job().observed
    assert relays_for(relayed.job, relayed.reports) == {}, "what is passed on names no relay"
    assert assignment_for(job, others[0].pod_uid).relay is None


# --- reports -------------------------------------------------------------------------------------------------


async def test_reports_of_peers_are_kept_as_their_own(setup: Setup) -> None:
    failed = of(PEER, generation=1, phase=AgentPhase.FAILED)
    assert await send(setup, POD, of(PEER, generation=1), of(OTHER)) == 204
    assert setup.woken == [(JOB, False)] * 3
    assert await send(setup, POD, failed) == 204
    assert known(setup)[PEER.uid] == failed
    assert setup.woken[3:] == [(JOB, True)], "an end is urgent"
    assert known(setup)[POD.uid] == report(present=()), "without those of its peers"


@pytest.mark.parametrize(
    ("sender", "peer"),
    [
        (POD, of(STRANGER)),
        (PEER, of(OTHER)),
        (PEER, of(POD, phase=AgentPhase.FAILED)),
        (STRANGER, of(PEER)),
        (POD, of(replace(PEER, pod="bert-1"))),
        (POD, of(replace(PEER, uid="uid-4"))),
    ],
    ids=["another job", "no node rank 0", "about node rank 0", "from another job", "another job's name", "unknown"],
)
async def test_nobody_speaks_for_others_than_its_peers(setup: Setup, sender: PodIdentity, peer: AgentReport) -> None:
    assert await send(setup, sender, peer, present=(peer.pod_uid,)) == 204
    assert known(setup).keys() == {sender.uid}
    assert {job for job, _ in setup.woken} == {JOB._replace(name=sender.pod.rpartition("-")[0])}
    assert setup.reports.num_present == 0


async def test_nor_for_those_of_an_earlier_generation(setup: Setup) -> None:
    setup.board.publish(JOB, GENERATION | {POD.uid: running(2, 1), PEER.uid: running(2, 0)})
    assert await send(setup, POD, of(OTHER), present=(PEER.uid, OTHER.uid)) == 204
    assert known(setup).keys() == {POD.uid}


async def test_before_the_operator_has_decided_the_relay_has_to_repeat_it(setup: Setup) -> None:
    setup.board.publish(JOB, {})
    assert await send(setup, POD, of(PEER)) == 503
    assert await send(setup, POD, present=(PEER.uid,)) == 503
    assert known(setup).keys() == {POD.uid}, "its own report was good"
    assert await send(setup, POD) == 204


async def test_an_older_report_of_the_same_process_changes_nothing(setup: Setup) -> None:
    """The relay hung with it, while the peer went to the operator itself."""
    assert await send(setup, POD, of(PEER, process="p", number=7, generation=2)) == 204
    assert await send(setup, POD, of(PEER, process="p", number=6, generation=1)) == 204
    assert known(setup)[PEER.uid].generation == 2
    assert await send(setup, POD, of(PEER, process="restarted", number=1)) == 204
    assert known(setup)[PEER.uid].generation == 0


async def test_what_a_peer_has_said_of_its_own_relay_is_kept(setup: Setup) -> None:
    """Its token doesn't cross the wire to the relay."""
    assert await send_own(setup, of(PEER, process="p", relay_port=7, relay_token="secret")) == 204
    setup.woken.clear()
    assert await send(setup, POD, of(PEER, process="p", number=1)) == 204
    assert known(setup)[PEER.uid].relay_token == "secret"
    assert setup.woken == [(JOB, False)], "of the relay's own first report"
    assert await send(setup, POD, of(PEER, process="restarted")) == 204
    assert known(setup)[PEER.uid].relay_token is None


# --- presence ------------------------------------------------------------------------------------------------


async def test_a_peer_is_there_as_long_as_its_relay_is(setup: Setup) -> None:
    await send(setup, POD, of(PEER), of(OTHER), present=(PEER.uid, OTHER.uid))
    poll = polling(setup, POD, await revision(setup))
    await are_present(setup, 3)
    setup.clock = 100.0
    assert [silence(setup, pod) for pod in (POD, PEER, OTHER)] == [0.0] * 3
    poll.cancel()
    await are_present(setup, 0)
    assert silence(setup, POD) == DEAD_BEFORE_CLOSED_SECONDS
    assert [silence(setup, pod) for pod in (PEER, OTHER)] == [0.0] * 2, "they are about to come themselves"
    assert setup.reports.of(frozenset({POD.uid}))[POD.uid].comes_by is None
    setup.clock = 103.0
    assert silence(setup, PEER) == 3.0


async def test_a_peer_is_heard_at_its_relay_before_the_relay_holds_a_poll(setup: Setup) -> None:
    """After an outage, the relay's report may come first."""
    await send(setup, POD, of(PEER), of(OTHER), present=(PEER.uid, OTHER.uid))
    setup.clock = 100.0
    await send(setup, POD, present=(PEER.uid,))
    assert silence(setup, PEER) == 0.0


async def test_a_peer_that_leaves_the_relay_may_be_lost(setup: Setup) -> None:
    await send(setup, POD, of(PEER), of(OTHER), present=(PEER.uid, OTHER.uid))
    poll = polling(setup, POD, await revision(setup))
    await are_present(setup, 3)
    setup.clock = 100.0
    setup.woken.clear()
    await send(setup, POD, present=(OTHER.uid,))
    assert setup.woken == [(JOB, True)]
    assert silence(setup, PEER) == DEAD_BEFORE_CLOSED_SECONDS
    setup.clock = 101.0
    assert silence(setup, PEER) == 1.0 + DEAD_BEFORE_CLOSED_SECONDS
    assert silence(setup, OTHER) == 0.0
    poll.cancel()


async def test_peers_that_have_lost_their_relay_are_waited_for(setup: Setup) -> None:
    """Those of many relays may come at once."""
    await send(setup, POD, of(PEER), of(OTHER), present=(PEER.uid, OTHER.uid))
    poll = polling(setup, POD, await revision(setup))
    await are_present(setup, 3)
    setup.board.publish(JOB, GENERATION | {POD.uid: running(2, 1), PEER.uid: running(2, 0)})
    setup.clock = 100.0
    setup.woken.clear()
    await send(setup, POD)
    assert setup.woken == [], "it doesn't lead them any more, so that says nothing of them"
    everybody = frozenset({PEER.uid, OTHER.uid})
    by = NOW + timedelta(seconds=100.0 + DEFAULT_TIMING.without_relay)
    assert {view.comes_by for view in setup.reports.of(everybody).values()} == {by}
    assert [silence(setup, pod) for pod in (PEER, OTHER)] == [0.0] * 2
    assert await send(setup, PEER, of(OTHER), present=(OTHER.uid,)) == 204
    assert setup.reports.of(everybody)[OTHER.uid].comes_by == by, "its new relay may not lead it yet"
    setup.board.publish(JOB, GENERATION | {uid: running(2, rank) for rank, uid in enumerate((PEER.uid, OTHER.uid))})
    assert await send(setup, PEER, of(OTHER), present=(OTHER.uid,)) == 204
    assert setup.reports.of(everybody)[OTHER.uid].comes_by is None
    poll.cancel()


async def test_peers_of_a_relay_that_leaves_are_waited_for(setup: Setup) -> None:
    """Its last report says nothing of them, and may come before its poll ends."""
    await send(setup, POD, of(PEER), present=(PEER.uid,))
    poll = polling(setup, POD, await revision(setup))
    await are_present(setup, 2)
    setup.clock = 100.0
    assert await send_own(setup, of(POD, phase=AgentPhase.DRAINED)) == 204
    view = setup.reports.of(frozenset({PEER.uid}))[PEER.uid]
    assert view.comes_by == NOW + timedelta(seconds=100.0 + DEFAULT_TIMING.without_relay)
    assert silence(setup, PEER) == 0.0
    poll.cancel()


async def test_a_peer_that_comes_itself_counts_no_longer_by_its_relay(setup: Setup) -> None:
    await send(setup, POD, of(PEER), present=(PEER.uid,))
    of_relay = polling(setup, POD, await revision(setup))
    await are_present(setup, 2)
    direct = polling(setup, PEER, GENERATION[PEER.uid].revision)
    async with asyncio.timeout(5):
        while PEER.uid not in setup.reports._num_polls:  # noqa: ASYNC110 - there is no event for it
            await asyncio.sleep(0)
    assert (silence(setup, PEER), setup.reports.num_present) == (0.0, 2)
    setup.clock = 100.0
    direct.cancel()
    await are_present(setup, 1)
    assert silence(setup, PEER) == DEAD_BEFORE_CLOSED_SECONDS, "though its relay holds a poll"
    of_relay.cancel()


async def test_a_pod_that_is_gone_is_forgotten(setup: Setup) -> None:
    await send(setup, POD, of(PEER), present=(PEER.uid,))
    poll = polling(setup, POD, await revision(setup))
    await are_present(setup, 2)
    setup.reports.keep(JOB, frozenset({POD.uid}))
    assert setup.reports.num_present == 1
    poll.cancel()
