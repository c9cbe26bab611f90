"""Losses that go wrong on one rank.

All ranks leave the same step out, and a resumed run decides alike.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from spottrain.data.audit import read_audit
from spottrain_api.contract.reports import FailureReason
from spottrain_api.settings.choices import StabilityAction
from spottrain_api.settings.stability import LossSpikeConfig, StabilityConfig
from trainer_runs import STEPS, Run, assert_drained, assert_succeeded

SPIKE = LossSpikeConfig(factor=5, window=5, action=StabilityAction.SKIP)
SKIP = StabilityConfig(non_finite=StabilityAction.SKIP, loss_spike=SPIKE)
ROLLBACK = StabilityConfig(non_finite=StabilityAction.ROLLBACK)


def same(run: Run, other: Run) -> bool:
    wanted = other.parameters()
    return all(torch.equal(value, wanted[name]) for name, value in run.parameters().items())


@pytest.mark.parametrize("strategy", ["ddp", "fsdp"])
def test_a_drain_in_the_middle_of_a_window_changes_no_bit(strategy: str, tmp_path: Path, fork: Any) -> None:
    bad = {4: "nan", 11: "spike"}
    steady = Run(tmp_path / "steady", fork, strategy=strategy, dropout=0.2, stability=SKIP)
    steady.generate(2, {1: bad})
    assert_succeeded(steady)
    assert [steady.progress(rank).skipped_steps for rank in range(2)] == [2, 2]
    assert "The loss of step 11 is" in (steady.progress(1).message or "")

    run = Run(tmp_path / "drained", fork, strategy=strategy, dropout=0.2, stability=SKIP)
    run.generate(2, {0: {6: "drain"}, 1: bad})
    assert 6 <= assert_drained(run) <= 8  # two to four losses into the window that the spike is judged by
    run.generate(2, {1: bad})
    assert_succeeded(run)

    assert same(run, steady)
    assert run.progress().skipped_steps == 2
    assert read_audit(tmp_path / "drained" / "audit").problems(STEPS) == []


def test_a_rollback_leaves_out_all_since_the_newest_commit(tmp_path: Path, fork: Any) -> None:
    skipped = Run(tmp_path / "skipped", fork, stability=SKIP)
    skipped.generate(2, {0: {7: "nan", 8: "nan"}})
    assert_succeeded(skipped)

    run = Run(tmp_path / "rolled-back", fork, stability=ROLLBACK)
    run.generate(2, {0: {5: "await"}, 1: {8: "nan"}})
    assert_succeeded(run)

    assert same(run, skipped)
    assert (run.progress().rollbacks, run.progress().skipped_steps) == (1, 2)
    assert "Training rolled back to the commit at step 6" in (run.progress().message or "")
    assert read_audit(tmp_path / "rolled-back" / "audit").problems(STEPS) == []


def test_deepspeed_leaves_out_what_ddp_leaves_out(tmp_path: Path, fork: Any) -> None:
    runs = [
        Run(tmp_path / strategy, fork, strategy=strategy, stability=SKIP, environment={"DS_ACCELERATOR": "cpu"})
        for strategy in ("ddp", "deepspeed")
    ]
    for run in runs:
        run.generate(2, {1: {4: "nan"}})
        assert_succeeded(run)
        assert run.progress().skipped_steps == 1
    ddp, deepspeed = (run.parameters() for run in runs)
    for name, value in deepspeed.items():
        torch.testing.assert_close(value, ddp[name], rtol=1e-4, atol=1e-5)


def test_a_run_that_only_goes_wrong_fails_with_a_sentence(tmp_path: Path, fork: Any) -> None:
    run = Run(tmp_path, fork, stability=StabilityConfig())
    (outcome, _) = run.generate(2, {1: {5: "nan"}})
    assert outcome is not None
    assert outcome.failure is not None
    assert outcome.failure.reason is FailureReason.TRAINING_UNSTABLE
    assert outcome.failure.message.startswith("The loss of step 5 is nan.")
    assert set(run.exit_codes) == {1}

    run.stability = ROLLBACK
    (outcome,) = run.generate(1, {0: dict.fromkeys(range(4, STEPS + 1), "nan")})
    assert outcome is not None
    assert outcome.failure is not None
    assert outcome.failure.message.startswith("The loss of step 7 is nan. Training rolled back to the model of step")
