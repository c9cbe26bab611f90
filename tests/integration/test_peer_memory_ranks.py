"""Ranks that replicate into the memory of members: what a loss without notice costs, and what is committed next."""

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
from spottrain_agent.memory_store import MemoryServer, Shelf
from spottrain_api.contract import MemoryCheckpoint, MemoryHolder, MemoryStep, PeerMemory
from trainer_runs import STEPS, Run, assert_succeeded

TOKEN = "secret"


class Memory:
    """One member's memory, as its agent keeps it; here a thread."""

    def __init__(self) -> None:
        self.held: tuple[MemoryStep, ...] = ()
        listen = socket.create_server(("127.0.0.1", 0))
        self.server = MemoryServer(listen, Shelf(self._tell))
        self.server.token = TOKEN
        self.address = f"127.0.0.1:{listen.getsockname()[1]}"
        threading.Thread(target=self.server.serve_forever, daemon=True).start()

    def _tell(self, held: tuple[MemoryStep, ...]) -> None:
        self.held = held

    def stop(self) -> None:
        self.server.shutdown()
        self.server.server_close()


@pytest.fixture
def memories() -> Iterator[list[Memory]]:
    started = [Memory() for _ in range(3)]
    yield started
    for memory in started:
        memory.stop()


def newest_of(memories: list[Memory], world_size: int) -> MemoryCheckpoint:
    """The newest step that these hold for all ranks between them."""
    steps = {(step.sequence, step.step) for memory in memories for step in memory.held}
    for sequence, number in sorted(steps, reverse=True):
        holders = [
            MemoryHolder(address=memory.address, ranks=step.ranks)
            for memory in memories
            for step in memory.held
            if step.sequence == sequence
        ]
        if {rank for holder in holders for rank in holder.ranks} == set(range(world_size)):
            return MemoryCheckpoint(
                generation=1, sequence=sequence, step=number, world_size=world_size, holders=tuple(holders)
            )
    raise AssertionError("no step is complete")


@pytest.mark.parametrize(("strategy", "world_after"), [("fsdp", 3), ("ddp", 2)])
def test_a_member_lost_without_notice_costs_two_steps_at_most(
    strategy: str, world_after: int, memories: list[Memory], tmp_path: Path, fork: Any
) -> None:
    """Nothing was ever committed: all comes from the memory of those that are left, and is committed at once."""
    run = Run(tmp_path / "run", fork, strategy=strategy, dropout=0.2, interval="1000steps", step_seconds=0.04)

    def told(world_size: int, resume: MemoryCheckpoint | None = None) -> None:
        run.memory = lambda rank: PeerMemory(
            token=TOKEN,
            own=memories[rank].address,
            peer=memories[(rank + 1) % world_size].address,
            interval=1,
            resume=resume,
        )

    told(3)
    run.generate(3, {1: {9: "vanish"}})
    head = run.head()
    assert head is None or not head.commits
    left = [memories[0], memories[2]]
    found = newest_of(left, 3)
    memories[1].stop()
    memories[1] = Memory()

    told(world_after, found)
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


def test_a_step_in_memory_outlasts_a_store_that_is_away(memories: list[Memory], tmp_path: Path, fork: Any) -> None:
    """Nothing was ever committed, and HEAD can't be fenced when the next generation starts."""
    run = Run(tmp_path, fork, interval="1000steps", step_seconds=0.04)
    run.memory = lambda rank: PeerMemory(
        token=TOKEN, own=memories[rank].address, peer=memories[1 - rank].address, interval=1
    )
    run.generate(2, {1: {9: "vanish"}})
    found = newest_of(memories[:1], 2)
    run.memory = lambda rank: PeerMemory(token=TOKEN, own=memories[0].address, resume=found)
    away = run.folder / "errno"
    away.write_text(str(errno.EIO))
    with run.running(1):
        wait_for((run.run_dir(0) / "progress-0.json").exists, "rank 0 begins", 60)
        wait_for(lambda: run.progress().checkpoint_failure, "it says why it can't", 60)
        away.unlink()
    assert_succeeded(run)
    assert read_audit(tmp_path / "audit").num_redone <= 2


def test_a_step_that_is_gone_from_memory_is_read_from_the_store(
    memories: list[Memory], tmp_path: Path, fork: Any
) -> None:
    run = Run(tmp_path, fork, interval="4steps", step_seconds=0.04)
    run.generate(2, {1: {6: "kill"}})
    gone = MemoryCheckpoint(
        generation=1,
        sequence=3,
        step=5,
        world_size=2,
        holders=(MemoryHolder(address=memories[2].address, ranks=(0, 1)),),
    )
    run.memory = lambda rank: PeerMemory(token=TOKEN, own=memories[rank].address, resume=gone)
    run.generate(2)
    assert_succeeded(run)
    assert "could not be read from members' memory" in (run.progress().message or "")
    assert run.progress().start_step == 4
