"""Ranks that replicate into members' memory.

The tests show the cost of a loss without notice, and the next commit.
"""

from __future__ import annotations

import errno
import socket
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from cluster_fixtures import wait_for
from spottrain.data.audit import read_audit
from spottrain_agent.replica_store import ReplicaServer, ReplicaStore
from spottrain_api.contract.replicas import HeldShards, ReplicaHolder, ReplicaSettings, ReplicatedStep
from trainer_runs import STEPS, Run, assert_succeeded

TOKEN = "secret"


class Member:
    """What holds one member's replicas, as its agent keeps it; here a thread."""

    def __init__(self) -> None:
        self.held: tuple[HeldShards, ...] = ()
        listen = socket.create_server(("127.0.0.1", 0))
        self.server = ReplicaServer(listen, ReplicaStore(self._tell))
        self.server.token = TOKEN
        self.address = f"127.0.0.1:{listen.getsockname()[1]}"
        threading.Thread(target=self.server.serve_forever, daemon=True).start()

    def _tell(self, held: tuple[HeldShards, ...]) -> None:
        self.held = held

    def stop(self) -> None:
        self.server.shutdown()
        self.server.server_close()


@pytest.fixture
def members() -> Iterator[list[Member]]:
    started = [Member() for _ in range(3)]
    yield started
    for member in started:
        member.stop()


def newest_of(members: list[Member], world_size: int) -> ReplicatedStep:
    """The newest step that these hold for all ranks between them."""
    steps = {(step.sequence, step.step) for member in members for step in member.held}
    for sequence, number in sorted(steps, reverse=True):
        holders = [
            ReplicaHolder(address=member.address, ranks=step.ranks)
            for member in members
            for step in member.held
            if step.sequence == sequence
        ]
        if {rank for holder in holders for rank in holder.ranks} == set(range(world_size)):
            return ReplicatedStep(
                generation=1, sequence=sequence, step=number, world_size=world_size, holders=tuple(holders)
            )
    raise AssertionError("no step is complete")


@pytest.mark.parametrize(("strategy", "world_after"), [("fsdp", 3), ("ddp", 2)])
def test_a_member_lost_without_notice_costs_two_steps_at_most(
    strategy: str, world_after: int, members: list[Member], tmp_path: Path, fork: Any
) -> None:
    """The next generation resumes from the memory of the members that are left.

    Nothing was ever committed. The generation commits what it has read at once.
    """
    run = Run(tmp_path / "run", fork, strategy=strategy, dropout=0.2, interval="1000steps", step_seconds=0.04)

    def configure(world_size: int, resume: ReplicatedStep | None = None) -> None:
        run.replicas = lambda rank: ReplicaSettings(
            token=TOKEN,
            own=members[rank].address,
            peer=members[(rank + 1) % world_size].address,
            interval=1,
            resume=resume,
        )

    configure(3)
    run.generate(3, {1: {9: "vanish"}})
    head = run.head()
    assert head is None or not head.commits
    left = [members[0], members[2]]
    found = newest_of(left, 3)
    members[1].stop()
    members[1] = Member()

    configure(world_after, found)
    run.generate(world_after)

    assert_succeeded(run)
    audit = read_audit(tmp_path / "run" / "audit")
    assert audit.problems(STEPS) == []
    assert audit.num_redone <= 2
    head = run.head()
    assert head is not None
    assert [commit.step for commit in head.commits] == [STEPS, found.step]
    if world_after == 3:
        steady = Run(tmp_path / "steady", fork, strategy=strategy, dropout=0.2)
        steady.generate(3)
        assert_succeeded(steady)
        wanted = steady.parameters()
        assert all(torch.equal(value, wanted[name]) for name, value in run.parameters().items())


def test_a_step_in_memory_outlasts_a_store_that_is_away(members: list[Member], tmp_path: Path, fork: Any) -> None:
    """A generation resumes from memory while it can't fence HEAD.

    Nothing was ever committed, and the store is away when the generation starts.
    """
    run = Run(tmp_path, fork, interval="1000steps", step_seconds=0.04)
    run.replicas = lambda rank: ReplicaSettings(
        token=TOKEN, own=members[rank].address, peer=members[1 - rank].address, interval=1
    )
    run.generate(2, {1: {9: "vanish"}})
    found = newest_of(members[:1], 2)
    run.replicas = lambda rank: ReplicaSettings(token=TOKEN, own=members[0].address, resume=found)
    away = run.folder / "errno"
    away.write_text(str(errno.EIO))
    with run.running(1):
        wait_for((run.run_dir(0) / "progress-0.json").exists, "rank 0 begins", 60)
        wait_for(lambda: run.progress().checkpoint_failure, "it says why it can't", 60)
        away.unlink()
    assert_succeeded(run)
    assert read_audit(tmp_path / "audit").num_redone <= 2


def test_a_step_that_is_gone_from_memory_is_read_from_the_store(
    members: list[Member], tmp_path: Path, fork: Any
) -> None:
    run = Run(tmp_path, fork, interval="4steps", step_seconds=0.04)
    run.generate(2, {1: {6: "kill"}})
    gone = ReplicatedStep(
        generation=1,
        sequence=3,
        step=5,
        world_size=2,
        holders=(ReplicaHolder(address=members[2].address, ranks=(0, 1)),),
    )
    run.replicas = lambda rank: ReplicaSettings(token=TOKEN, own=members[rank].address, resume=gone)
    run.generate(2)
    assert_succeeded(run)
    assert "could not be read from members' memory" in (run.progress().message or "")
    assert run.progress().start_step == 4
