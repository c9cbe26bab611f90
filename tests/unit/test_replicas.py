"""Replicas in parts.

The tests show what a member's process holds and whom it serves, and which step the operator names.
"""

from __future__ import annotations

import http.client
import socket
import threading
import time
from collections.abc import Iterable, Iterator
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
import torch

from memory_storage import MemoryStorage
from spottrain.checkpoint.checkpointer import Checkpointer
from spottrain.checkpoint.errors import CorruptCheckpoint, ObjectNotFound, StorageDenied, StorageUnavailable
from spottrain.checkpoint.peers import replica_client
from spottrain.checkpoint.peers.replica_client import ReplicaClient
from spottrain.checkpoint.peers.replicas import Replicas
from spottrain_agent import replica_store
from spottrain_agent.replica_store import ReplicaServer, ReplicaStore
from spottrain_api.contract.assignments import AgentPhase, AgentReport, CapacityType, GenerationAssignment, Member
from spottrain_api.contract.configuration import TrainerConfig
from spottrain_api.contract.replicas import HeldShards, ReplicaHolder, ReplicaSettings, ReplicatedStep
from spottrain_api.contract.reports import CommitRef
from spottrain_api.v1alpha1.status import GenerationState, GenerationStatus, TrainingJobStatus
from spottrain_operator.core.assignments import assignment_for
from spottrain_operator.core.facts.replicas import newest_replicated_step
from spottrain_operator.core.facts.situation import Situation
from spottrain_operator.core.model import JobView, NodeView, Observed, PodView, ReportView
from world.jobs import spec_of

NOW = datetime(2026, 1, 1, tzinfo=UTC)
TOKEN = "secret"


def held(sequence: int, *ranks: int, generation: int = 1, world_size: int = 3) -> HeldShards:
    return HeldShards(
        generation=generation, sequence=sequence, step=10 * sequence, world_size=world_size, ranks=ranks
    )


# --- the process that holds them -------------------------------------------------------------------------


@pytest.fixture
def reported() -> list[tuple[HeldShards, ...]]:
    return []


@pytest.fixture
def server(reported: list[tuple[HeldShards, ...]]) -> Iterator[ReplicaServer]:
    server = ReplicaServer(socket.create_server(("127.0.0.1", 0)), ReplicaStore(reported.append))
    server.token = TOKEN
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield server
    server.shutdown()
    server.server_close()


def address(server: ReplicaServer) -> str:
    return f"127.0.0.1:{server.socket.getsockname()[1]}"


def test_the_two_newest_steps_are_held_and_older_ones_dropped(
    server: ReplicaServer, reported: list[tuple[HeldShards, ...]]
) -> None:
    client = ReplicaClient(address(server), TOKEN)
    for sequence in (1, 2, 3):
        for rank in (0, 2):
            client.put({f"1/{sequence}/rank-{rank}.data": bytes([sequence, rank])}, held(sequence, rank))
    assert reported[-1] == (held(2, 0, 2), held(3, 0, 2))
    assert client.get("1/2/rank-2.data") == bytes([2, 2])
    with pytest.raises(ObjectNotFound):
        client.get("1/1/rank-0.data")
    client.put({}, held(1, 1, generation=2))
    assert reported[-1] == (held(3, 0, 2), held(1, 1, generation=2))


def test_a_range_is_read_into_memory(server: ReplicaServer) -> None:
    client, data = ReplicaClient(address(server), TOKEN), torch.arange(9 << 20, dtype=torch.int32).numpy().tobytes()
    client.put({"1/1/big": memoryview(data)}, held(1, 0))
    into = bytearray(len(data) - 7)
    assert client.read_into("1/1/big", 7, memoryview(into)) == len(into)
    assert into == data[7:]
    assert client.read_into("1/1/big", len(data) - 3, memoryview(into)[:10]) == 3


def test_only_ranks_with_the_generation_s_token_are_served(
    server: ReplicaServer, reported: list[tuple[HeldShards, ...]]
) -> None:
    stranger = ReplicaClient(address(server), "guess")
    for attempt in (
        lambda: stranger.put({"1/1/x": b"1" * (4 << 20)}, held(1, 0)),
        lambda: stranger.put({}, held(1, 0)),
        lambda: stranger.get("1/1/x"),
    ):
        with pytest.raises((StorageDenied, StorageUnavailable)):
            attempt()
    assert reported == []
    server.token = ""
    with pytest.raises(StorageDenied, match="not open to this generation"):
        ReplicaClient(address(server), "").get("1/1/x")


def test_a_member_that_is_gone_is_named() -> None:
    with socket.create_server(("127.0.0.1", 0)) as nobody:
        port = nobody.getsockname()[1]
    with pytest.raises(StorageUnavailable, match=f"127.0.0.1:{port} can't be reached"):
        ReplicaClient(f"127.0.0.1:{port}", TOKEN).get("1/1/x")


LIMIT_SECONDS = 1.0
SLOW_BYTES = 24 << 20  # more than the system's buffers hold, too


class Slowly:
    """A file that gives little at a time, until twice the limit has passed."""

    def __init__(self, file: Any) -> None:
        self._file = file
        self._end = time.monotonic() + 2 * LIMIT_SECONDS

    def readinto(self, memory: memoryview) -> int:
        if time.monotonic() < self._end:
            time.sleep(LIMIT_SECONDS / 40)
            memory = memory[: 1 << 17]
        length: int = self._file.readinto(memory)
        return length

    def __getattr__(self, name: str) -> Any:
        return getattr(self._file, name)


@pytest.fixture
def narrow(server: ReplicaServer, monkeypatch: pytest.MonkeyPatch) -> ReplicaServer:
    """A server whose connections hold little, with a short limit on both sides."""
    for buffer in (socket.SO_SNDBUF, socket.SO_RCVBUF):
        server.socket.setsockopt(socket.SOL_SOCKET, buffer, 1 << 16)
    monkeypatch.setattr(replica_client, "TIMEOUT_SECONDS", LIMIT_SECONDS)
    monkeypatch.setattr(replica_store._Handler, "timeout", LIMIT_SECONDS)
    return server


def test_a_shard_that_takes_long_to_send_but_never_stalls_is_held(
    narrow: ReplicaServer, reported: list[tuple[HeldShards, ...]], monkeypatch: pytest.MonkeyPatch
) -> None:
    class TakesSlowly(replica_store._Handler):
        def setup(self) -> None:
            super().setup()
            self.rfile = Slowly(self.rfile)  # type: ignore[assignment]

    monkeypatch.setattr(narrow, "RequestHandlerClass", TakesSlowly)
    ReplicaClient(address(narrow), TOKEN).put({"1/1/big": memoryview(bytes(SLOW_BYTES))}, held(1, 0))
    assert reported[-1] == (held(1, 0),)


def test_a_shard_that_takes_long_to_read_but_never_stalls_arrives_whole(
    narrow: ReplicaServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    class ReadsSlowly(http.client.HTTPResponse):
        def __init__(self, *args: Any, **options: Any) -> None:
            super().__init__(*args, **options)
            self.fp = Slowly(self.fp)  # type: ignore[assignment]

    monkeypatch.setattr(http.client.HTTPConnection, "response_class", ReadsSlowly)
    narrow.store.put((1, 1), "big", bytearray(SLOW_BYTES))
    into = bytearray(b"1" * SLOW_BYTES)
    assert ReplicaClient(address(narrow), TOKEN).read_into("1/1/big", 0, memoryview(into)) == SLOW_BYTES
    assert not any(into)


# --- one rank --------------------------------------------------------------------------------------------


def replicas(settings: ReplicaSettings) -> Replicas:
    return Replicas(settings, generation=1, rank=0, world_size=1, ranks_per_node=1, group=None)


def test_what_was_replicated_is_loaded_bit_for_bit(
    server: ReplicaServer, reported: list[tuple[HeldShards, ...]]
) -> None:
    mine = replicas(ReplicaSettings(token=TOKEN, own=address(server)))
    state = {"model": {"w": torch.randn(5, 3), "b": torch.tensor(2.0)}, "step": 7}
    assert mine.replicate(state, step=70, extra={"lr": float("nan")}, rank_state=(1, 2))
    mine.close()
    assert reported[-1] == (held(1, 0, world_size=1).model_copy(update={"step": 70}),)
    assert mine.cost_seconds is None  # the first is no measure
    assert mine.interval(0.1) == 1

    found = ReplicatedStep(
        generation=1, sequence=1, step=70, world_size=1, holders=(ReplicaHolder(address=address(server), ranks=(0,)),)
    )
    into = {"model": {"w": torch.zeros(5, 3), "b": torch.tensor(0.0)}, "step": 0}
    reader = Checkpointer(MemoryStorage(), generation=2, attempt_id="a", rank=0, world_size=1)
    loaded = reader.load_replica(lambda _: into, mine, found)
    assert torch.equal(into["model"]["w"], state["model"]["w"])  # type: ignore[index]
    assert (into["step"], loaded.step, loaded.rank_state) == (7, 70, (1, 2))  # type: ignore[comparison-overlap]

    shard = server.store.get((1, 1), "rank-00000.data")
    assert shard is not None
    shard[3] ^= 1
    with pytest.raises(CorruptCheckpoint, match="damaged between bytes"):
        reader.load_replica(lambda _: into, mine, found)
    with pytest.raises(CorruptCheckpoint, match="is not whole"):
        reader.load_replica(lambda _: into, mine, found.model_copy(update={"sequence": 2}))


def test_a_peer_that_is_gone_costs_only_its_replica(
    server: ReplicaServer, reported: list[tuple[HeldShards, ...]], caplog: pytest.LogCaptureFixture
) -> None:
    mine = replicas(ReplicaSettings(token=TOKEN, own=address(server), peer="127.0.0.1:1"))
    for step in (1, 2):
        assert mine.replicate({"w": torch.ones(2)}, step=step, extra={}, rank_state=None)
        mine.close()
    assert [step.step for step in reported[-1]] == [1, 2]
    assert mine.cost_seconds is not None
    assert "can't be reached" in caplog.text


def test_replicas_are_due_by_the_interval(server: ReplicaServer) -> None:
    mine = replicas(ReplicaSettings(token=TOKEN, own=address(server), interval=5))
    assert mine.is_due(20, 0.1)
    assert mine.replicate({"w": torch.ones(2)}, step=20, extra={}, rank_state=None)
    mine.close()
    assert [step for step in (20, 21, 24, 25, 30) if mine.is_due(step, 0.1)] == [25, 30]


@pytest.mark.parametrize(
    ("asked", "cost_seconds", "step_seconds", "expected", "explained"),
    [
        pytest.param(7, 10.0, 0.1, 7, "every 7 steps, as the job says", id="as-the-job-says"),
        pytest.param(None, None, 0.1, 1, "every step at first, to measure what that costs", id="nothing-measured"),
        pytest.param(None, 0.001, 0.1, 1, "every step, as that costs 1 ms of training", id="cheap"),
        pytest.param(None, 0.05, 0.1, 50, "every 50 steps, as that costs 50 ms of training", id="one-percent"),
    ],
)
def test_the_interval_keeps_the_cost_below_one_percent(
    asked: int | None, cost_seconds: float | None, step_seconds: float, expected: int, explained: str
) -> None:
    mine = replicas(ReplicaSettings(token=TOKEN, own="127.0.0.1:1", interval=asked))
    mine.cost_seconds = cost_seconds
    assert mine.interval(step_seconds) == expected
    assert mine.explain(step_seconds) == f"in peers' memory {explained}"


# --- the operator ----------------------------------------------------------------------------------------


def pod(number: int) -> PodView:
    return PodView(
        name=f"job-{number}",
        uid=f"u{number}",
        sequence=number,
        capacity_type=CapacityType.SPOT,
        template_hash="t",
        created_at=NOW,
        phase="Running",
        ready=True,
        ready_since=NOW,
        node=f"n{number}",
        ip=f"10.0.0.{number}",
    )


def situation(steps: dict[int, tuple[HeldShards, ...]], *, phase: AgentPhase = AgentPhase.STOPPED) -> Situation:
    """Pods 0, 1, ... that have stopped and hold these steps."""
    reports = {
        f"u{number}": ReportView(
            report=AgentReport(
                pod=f"job-{number}",
                pod_uid=f"u{number}",
                generation=1,
                phase=phase,
                warm=True,
                rendezvous_port=1,
                replica_port=9000,
                held=found,
                sent_at=NOW,
            ),
            received_at=NOW,
        )
        for number, found in steps.items()
    }
    checkpoint = {"uri": "s3://bucket/job", "peerReplicas": 1}
    job = JobView(
        namespace="n",
        name="job",
        uid="0123456789",
        spec=spec_of(checkpoint=checkpoint),
        metadata_generation=1,
        created_at=NOW,
    )
    observed = Observed(
        job=job,
        pods=tuple(pod(number) for number in steps),
        nodes={f"n{number}": NodeView(name=f"n{number}") for number in steps},
        reports=reports,
        template_hash="t",
        listening_since=NOW,
    )
    return Situation(observed, NOW + timedelta(seconds=1))


def commit(generation: int, step: int) -> CommitRef:
    return CommitRef(generation=generation, step=step, manifest="m", committed_at=NOW)


@pytest.mark.parametrize(
    ("steps", "commit_", "expected"),
    [
        pytest.param({0: (held(4, 0, 2),), 1: (held(4, 0, 1),)}, None, (4, {0: (0, 2), 1: (1,)}), id="complete"),
        pytest.param({0: (held(4, 0, 2),), 2: (held(4, 2),)}, None, None, id="a-shard-is-lost"),
        pytest.param({0: (held(4, 0, world_size=2**62),)}, None, None, id="of-more-ranks-than-fit-in-memory"),
        pytest.param(
            {0: (held(4, 0, 1, 2, 3, 5), held(5, 0, 1, 3))}, None, (4, {0: (0, 1, 2)}), id="a-rank-beyond-the-last"
        ),
        pytest.param(
            {0: (held(4, 0, 2), held(5, 0, 2)), 1: (held(4, 1, 0), held(5, 0))},
            None,
            (4, {0: (0, 2), 1: (1,)}),
            id="the-newest-is-not-complete",
        ),
        pytest.param({0: (held(4, 0, 1, 2),)}, commit(1, 30), (4, {0: (0, 1, 2)}), id="newer-than-the-commit"),
        pytest.param({0: (held(4, 0, 1, 2),)}, commit(1, 40), None, id="committed-already"),
        pytest.param({0: (held(4, 0, 1, 2),)}, commit(2, 30), None, id="of-a-generation-before-the-commit"),
        pytest.param(
            {0: (held(9, 0, 1, 2), held(1, 0, 1, 2, generation=2))},
            None,
            (1, {0: (0, 1, 2)}),
            id="of-the-newest-generation",
        ),
    ],
)
def test_the_newest_step_that_survivors_hold_between_them(
    steps: dict[int, tuple[HeldShards, ...]],
    commit_: CommitRef | None,
    expected: tuple[int, dict[int, tuple[int, ...]]] | None,
) -> None:
    scene = situation(steps)
    found = newest_replicated_step(scene, scene.candidates(scene.pods), commit_)
    if expected is None:
        assert found is None
        return
    assert found is not None
    holders = tuple(ReplicaHolder(address=f"10.0.0.{n}:9000", ranks=ranks) for n, ranks in expected[1].items())
    assert (found.sequence, found.holders) == (expected[0], holders)


def test_a_member_that_still_says_that_it_trains_is_not_counted_on() -> None:
    scene = situation({0: (held(4, 0, 1, 2),)}, phase=AgentPhase.RUNNING)
    assert newest_replicated_step(scene, scene.candidates(scene.pods), None) is None


def test_nothing_is_looked_for_where_the_job_wants_no_replicas() -> None:
    scene = situation({0: (held(4, 0, 1, 2),)})
    job = replace(scene.observed.job, spec=spec_of())
    without = Situation(replace(scene.observed, job=job), scene.now)
    assert newest_replicated_step(without, without.candidates(without.pods), None) is None


def member(rank: int, node: str) -> Member:
    return Member(
        pod=f"job-{rank}",
        pod_uid=f"u{rank}",
        address=f"10.0.0.{rank}",
        node=node,
        node_rank=rank,
        capacity_type=CapacityType.SPOT,
        replica_port=9000,
    )


def job_of(members: tuple[Member, ...]) -> JobView:
    generation = GenerationStatus(
        number=3,
        state=GenerationState.ACTIVE,
        rendezvous_id="r",
        rendezvous_endpoint="10.0.0.0:1",
        world_size=len(members),
        members=members,
        started_at=NOW,
    )
    return replace(situation({}).observed.job, status=TrainingJobStatus(generation=generation))


def assigned_to(
    job: JobView, ranks: Iterable[int]
) -> tuple[list[GenerationAssignment | None], list[ReplicaSettings | None]]:
    reported = [assignment_for(job, f"u{rank}", b"key").generation for rank in ranks]
    return reported, [TrainerConfig.model_validate(each.trainer).replicas for each in reported if each is not None]


@pytest.mark.parametrize(
    ("nodes", "peers"),
    [
        pytest.param("abc", [1, 2, 0], id="the-next-member"),
        pytest.param("aabb", [2, 2, 0, 0], id="on-another-node"),
        pytest.param("aa", [None, None], id="no-other-node"),
    ],
)
def test_peers_are_on_other_nodes(nodes: str, peers: list[int | None]) -> None:
    job = job_of(tuple(member(rank, node) for rank, node in enumerate(nodes)))
    reported, settings = assigned_to(job, range(len(nodes)))
    assert [each and each.own for each in settings] == [f"10.0.0.{rank}:9000" for rank in range(len(nodes))]
    assert [each and each.peer for each in settings] == [
        None if peer is None else f"10.0.0.{peer}:9000" for peer in peers
    ]
    (token,) = {each.token for each in settings if each is not None}
    assert {generation and generation.replica_token for generation in reported} == {token}
    other = assignment_for(job, "u0", b"another key").generation
    assert other is not None
    assert other.replica_token is not None
    assert other.replica_token != token


def test_members_keep_their_settings_if_a_restored_status_lacks_others() -> None:
    _, settings = assigned_to(job_of((member(3, "d"), member(1, "b"))), (1, 3))
    assert [each and (each.own, each.peer) for each in settings] == [
        ("10.0.0.1:9000", "10.0.0.3:9000"),
        ("10.0.0.3:9000", "10.0.0.1:9000"),
    ]
