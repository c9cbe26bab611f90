"""A notice in the middle of a long step of two ranks, with dropout and batch norm."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from spottrain.data.audit import read_audit
from trainer_runs import Run, assert_drained, assert_succeeded

STEPS = 5


def long_steps(folder: Path, fork: Any, strategy: str, *, margin_seconds: float = 1000.0) -> Run:
    """Steps that count as long. No step can be completed within the margin before a deadline."""
    return Run(
        folder,
        fork,
        strategy=strategy,
        dropout=0.2,
        global_batch=24,
        num_samples=48,
        interval="1000steps",
        settings={"has_norm": True, "takes_steps_for_long": margin_seconds},
    )


@pytest.fixture(scope="module", params=["ddp", "fsdp"])
def uninterrupted(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory, fork: Any) -> Run:
    run = long_steps(tmp_path_factory.mktemp(request.param), fork, request.param)
    run.generate(2, steps=STEPS)
    assert_succeeded(run)
    return run


def assert_ends_as(uninterrupted: Run, run: Run) -> None:
    run.generate(2, steps=STEPS)
    assert_succeeded(run)
    wanted = uninterrupted.parameters()
    assert all(torch.equal(value, wanted[name]) for name, value in run.parameters().items())
    audit = read_audit(run.folder / "audit")
    assert audit.problems(STEPS) == []
    assert audit.num_redone == 0


def test_the_ranks_abandon_a_step_and_redo_none(uninterrupted: Run, tmp_path: Path, fork: Any) -> None:
    run = long_steps(tmp_path, fork, uninterrupted.strategy)
    run.generate(2, {1: {"3.1": "notice 60 heard"}}, steps=STEPS)
    assert assert_drained(run) == 2
    assert_ends_as(uninterrupted, run)


def test_with_time_left_they_complete_the_step(uninterrupted: Run, tmp_path: Path, fork: Any) -> None:
    run = long_steps(tmp_path, fork, uninterrupted.strategy, margin_seconds=1.0)
    run.generate(2, {0: {"3.1": "notice 600 heard"}}, steps=STEPS)
    assert assert_drained(run) == 3
    assert_ends_as(uninterrupted, run)


def test_what_takes_longer_than_the_notice_costs_no_step(uninterrupted: Run, tmp_path: Path, fork: Any) -> None:
    run = long_steps(tmp_path, fork, uninterrupted.strategy)
    run.settings["commits_at_once"] = True
    for rank, place, committed in [
        (1, "2.1", 1),  # a micro-batch
        (0, "3+", 3),  # an evaluation after the update, on one rank
        (1, "5-", 4),  # an evaluation at the start of a step
    ]:
        run.generate(2, {rank: {place: "notice 60 committed"}}, steps=STEPS)
        assert assert_drained(run) == committed
    assert_ends_as(uninterrupted, run)
