"""How long torchrun gets to report how a rank has ended.

torchrun reports a killed rank only after it has ended the node's other ranks, which may take RANKS_END_SECONDS.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from types import SimpleNamespace

import pytest

import lone_member
from spottrain_agent import generation_run
from spottrain_agent.generation_run import SETTLE_BESIDE_OTHERS_SECONDS, SETTLE_SECONDS, GenerationRun
from spottrain_agent.launcher import RANKS_END_SECONDS
from spottrain_agent.records import (
    FILE_LAUNCHER,
    LauncherEnded,
    WorkerEnded,
    WorkerStarted,
    worker_ended_file,
    worker_started_file,
)
from spottrain_agent.verdict import judge
from spottrain_api.contract.assignments import AgentPhase
from spottrain_api.settings.entrypoint import Entrypoint


@dataclass
class Node:
    """A node with two ranks, by a clock of its own."""

    run: GenerationRun
    living: set[int] = field(default_factory=lambda: {0, 1})
    now: float = 1000.0

    def phase(self, *, after: float = 0.0) -> AgentPhase | None:
        """What the agent says, some seconds later."""
        self.now += after
        verdict = judge(self.run.observe())
        return verdict.phase if verdict is not None else None

    def ends(self, local_rank: int) -> None:
        """The script ends with exit code 0.

        The process waits for the other ranks, as torch has it.
        """
        WorkerEnded(exit_code=0).write(self.run.directory.path / worker_ended_file(local_rank))

    def vanishes(self, local_rank: int) -> None:
        """The process is killed, or leaves by os._exit."""
        self.living.remove(local_rank)
        assert self.phase() is None

    def torchrun_reports(self, local_rank: int) -> None:
        LauncherEnded(exit_codes={local_rank: -9}).write(self.run.directory.path / FILE_LAUNCHER)


@pytest.fixture
def node(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Node:
    generation = lone_member.generation(Entrypoint(script="train.py"), processes_per_node=2)
    node = Node(GenerationRun(generation, lone_member.settings(tmp_path), 30.0))
    node.run.directory.create({})
    for local_rank in range(2):
        started = WorkerStarted(pid=local_rank, started_at=datetime.now(UTC))
        started.write(node.run.directory.path / worker_started_file(local_rank))
    monkeypatch.setattr(generation_run, "is_alive", lambda pid: pid in node.living)
    monkeypatch.setattr(generation_run, "time", SimpleNamespace(monotonic=lambda: node.now))
    return node


def test_a_killed_rank_has_not_succeeded_when_the_other_ends_well_meanwhile(node: Node) -> None:
    node.vanishes(1)
    assert node.phase(after=9.0) is None
    node.ends(0)
    assert node.phase(after=9.0) is None
    node.vanishes(0)
    node.torchrun_reports(1)
    assert node.phase(after=1.0) is AgentPhase.FAILED


@pytest.mark.parametrize(
    ("first", "seconds", "second"),
    [(1, RANKS_END_SECONDS, 0), (0, 600.0, 1)],
    ids=["and torchrun kills the other", "long after the other left"],
)
def test_a_rank_that_is_killed_has_not_succeeded(node: Node, first: int, seconds: float, second: int) -> None:
    node.vanishes(first)
    assert node.phase(after=seconds) is None
    node.vanishes(second)
    node.torchrun_reports(1)
    assert node.phase(after=1.0) is AgentPhase.FAILED


def test_ranks_of_which_torchrun_reports_nothing_have_succeeded(node: Node) -> None:
    node.vanishes(0)
    node.vanishes(1)
    assert node.phase(after=SETTLE_SECONDS - 1.0) is None
    assert node.phase(after=1.0) is AgentPhase.SUCCEEDED


def test_a_rank_that_lost_the_other_waits_for_torchrun_only_so_long(node: Node) -> None:
    node.vanishes(0)
    lost = WorkerEnded(exit_code=1, exception="builtins.RuntimeError", message="Connection reset by peer")
    lost.write(node.run.directory.path / worker_ended_file(1))
    assert node.phase() is None, "it may have been killed"
    assert node.phase(after=SETTLE_BESIDE_OTHERS_SECONDS) is AgentPhase.FAILED
