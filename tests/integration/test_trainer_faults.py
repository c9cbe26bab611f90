"""Ranks on gloo with scripted faults.

The tests show what is left of a run that was drained, killed and resized.
"""

from __future__ import annotations

import random
from datetime import datetime
from pathlib import Path
from typing import Any

import pytest
import torch

from cluster_fixtures import wait_for
from spottrain.data.audit import read_audit
from spottrain_api.contract.configuration import DrainRequest
from spottrain_api.contract.names import FILE_AT_RISK
from spottrain_api.contract.reports import CommitRef, FailureReason, OutcomeKind
from trainer_runs import STEPS, Faults, Run, assert_drained, assert_succeeded


@pytest.fixture(scope="module", params=["ddp", "fsdp"])
def uninterrupted(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory, fork: Any) -> Run:
    """Three ranks with dropout, to compare bit by bit."""
    run = Run(tmp_path_factory.mktemp(request.param), fork, strategy=request.param, dropout=0.2)
    run.generate(3)
    assert_succeeded(run)
    return run


def test_a_drain_and_resume_at_the_same_world_size_changes_no_bit(
    uninterrupted: Run, draw: random.Random, tmp_path: Path, fork: Any
) -> None:
    run = Run(tmp_path, fork, strategy=uninterrupted.strategy, dropout=0.2)
    asked_at = draw.randrange(1, STEPS - 2)
    run.generate(3, {draw.randrange(3): {asked_at: "drain"}})
    assert asked_at <= assert_drained(run) <= asked_at + 2

    run.generate(3)

    assert_succeeded(run)
    wanted = uninterrupted.parameters()
    assert all(torch.equal(value, wanted[name]) for name, value in run.parameters().items())
    audit = read_audit(tmp_path / "audit")
    assert audit.problems(STEPS) == []
    assert audit.num_redone == 0


def test_a_rank_killed_in_a_step_costs_the_steps_since_the_newest_commit(
    uninterrupted: Run, tmp_path: Path, fork: Any
) -> None:
    run = Run(tmp_path, fork, strategy=uninterrupted.strategy, dropout=0.2)
    run.generate(3, {1: {8: "kill"}})
    assert run.exit_codes[1] == -9
    survivors = [outcome for outcome in (run.outcomes[0], run.outcomes[2]) if outcome is not None]
    assert [outcome.failure and outcome.failure.reason for outcome in survivors] == [FailureReason.LOST_PEER] * 2
    head = run.head()
    assert head is not None
    assert head.newest is not None
    assert head.newest.step in (3, 6)

    run.generate(3)

    assert_succeeded(run)
    wanted = uninterrupted.parameters()
    assert all(torch.equal(value, wanted[name]) for name, value in run.parameters().items())
    audit = read_audit(tmp_path / "audit")
    assert audit.problems(STEPS) == []
    assert audit.num_redone <= 8 - head.newest.step


@pytest.mark.parametrize("strategy", ["ddp", "fsdp"])
def test_resizing_keeps_the_order_of_samples_and_the_loss(strategy: str, tmp_path: Path, fork: Any) -> None:
    steady = Run(tmp_path / "steady", fork, strategy=strategy)
    steady.generate(2)
    assert_succeeded(steady)

    resized = Run(tmp_path / "resized", fork, strategy=strategy)
    resized.generate(2, {1: {3: "drain"}})
    assert_drained(resized)
    resized.generate(3, {2: {8: "sigterm"}})
    assert_drained(resized)
    resized.generate(1)
    assert_succeeded(resized)

    wanted = steady.parameters()
    for name, value in resized.parameters().items():
        torch.testing.assert_close(value, wanted[name], rtol=1e-4, atol=1e-5)
    for step, loss in resized.losses().items():
        assert loss == pytest.approx(steady.losses()[step], rel=1e-3)
    audit = read_audit(tmp_path / "resized" / "audit")
    assert audit.problems(STEPS) == []
    assert audit.num_redone == 0
    assert {step.world for step in audit.steps} == {1, 2, 3}


def test_the_loss_of_a_step_is_the_same_at_any_world_size(tmp_path: Path, fork: Any) -> None:
    """Also where the world size does not divide the batch.

    Then ranks run micro-batches that do not count.
    """
    losses = {}
    for world_size in (1, 3):
        run = Run(tmp_path / str(world_size), fork, settings={"step_loss": True})
        run.generate(world_size, steps=6)
        assert_succeeded(run)
        losses[world_size] = run.step_losses()
        late = run.losses()
        assert {step: losses[world_size][step] for step in late} == pytest.approx(late, rel=1e-6)
    assert list(losses[1]) == [str(number) for number in range(1, 7)]
    assert losses[3] == pytest.approx(losses[1], rel=1e-5)


@pytest.mark.parametrize("strategy", ["ddp", "fsdp"])
def test_to_export_the_model_before_the_first_step_changes_no_bit(strategy: str, tmp_path: Path, fork: Any) -> None:
    found = []
    for early in (False, True):
        run = Run(tmp_path / str(early), fork, strategy=strategy, settings={"export_first": early})
        run.generate(2, steps=2)
        assert_succeeded(run)
        found.append(run.parameters())
    steady, exported = found
    assert all(torch.equal(value, steady[name]) for name, value in exported.items())


@pytest.mark.parametrize("strategy", ["ddp", "fsdp", "deepspeed"])
def test_variables_of_the_script_go_on_at_another_world_size(strategy: str, tmp_path: Path, fork: Any) -> None:
    """Also after a loss without notice, which undoes them together with the model."""
    run = Run(tmp_path, fork, strategy=strategy)
    run.generate(2, {1: {4: "drain"}})
    assert_drained(run)
    run.generate(1, {0: {10: "kill"}})

    run.generate(3)

    assert_succeeded(run)
    assert run.seen() == [list(range(1, STEPS + 1))] * 3


@pytest.mark.nightly
@pytest.mark.parametrize("strategy", ["fsdp", "deepspeed"])
def test_ten_resizes_use_every_sample_once_and_train_the_same(
    strategy: str, draw: random.Random, tmp_path: Path, fork: Any
) -> None:
    """A run with ten resizes uses every sample once and trains as a steady one.

    It takes three epochs and a bit, with a global batch that doesn't divide. World sizes are drawn.
    """
    steps, batch = 24, 7
    steady = Run(tmp_path / "steady", fork, global_batch=batch)
    steady.generate(1, steps=steps)
    assert_succeeded(steady)

    resized = Run(tmp_path / "resized", fork, strategy=strategy, global_batch=batch)
    worlds = [draw.randrange(1, 7)]
    while len(worlds) < 11:
        worlds.append(draw.choice([world for world in range(1, 7) if world != worlds[-1]]))
    for step, world in enumerate(worlds[:-1]):
        resized.generate(world, {0: {2 * step + 1: "drain"}}, steps=steps)
        assert_drained(resized)
    resized.generate(worlds[-1], steps=steps)
    assert_succeeded(resized)

    audit = read_audit(tmp_path / "resized" / "audit")
    assert audit.problems(steps) == [], worlds
    assert audit.num_redone == 0
    samples = [sample for step in audit.steps for sample in step.samples]
    for epoch in range(steps * batch // resized.num_samples):
        used = samples[epoch * resized.num_samples : (epoch + 1) * resized.num_samples]
        assert sorted(used) == list(range(resized.num_samples))
    for name, value in resized.parameters().items():
        torch.testing.assert_close(value, steady.parameters()[name], rtol=1e-3, atol=1e-4, msg=f"{name} {worlds}")
    for number, loss in resized.losses().items():
        assert loss == pytest.approx(steady.losses()[number], rel=1e-3), worlds


def test_a_drain_during_start_up_makes_no_step_and_no_commit(tmp_path: Path, fork: Any) -> None:
    run = Run(tmp_path, fork)
    run.generate(2, {1: {0: "drain"}})
    assert assert_drained(run) == 0
    assert run.outcomes[0] is not None
    assert run.outcomes[0].commit is None

    run.generate(2, {0: {4: "drain"}})
    step = assert_drained(run)
    run.generate(2, {0: {0: "drain"}})

    assert assert_drained(run) == step
    assert run.progress().drain_seen_at is not None
    assert {"python_started", "process_group", "prepared", "loaded"} <= run.progress().milestones.keys()


def test_a_drain_that_comes_with_the_last_step_lets_the_job_succeed(tmp_path: Path, fork: Any) -> None:
    run = Run(tmp_path, fork)
    run.generate(2, {1: {STEPS: "drain"}})
    assert_succeeded(run)
    assert run.outcomes[0] is not None
    assert run.outcomes[0].commit is not None
    assert run.outcomes[0].commit.step == STEPS

    run.generate(2)  # nothing is left to do, and nothing is done again

    assert_succeeded(run)
    assert read_audit(tmp_path / "audit").num_redone == 0


def test_the_step_after_which_a_script_leaves_the_loop_is_committed_as_done(tmp_path: Path, fork: Any) -> None:
    run = Run(tmp_path, fork, leave_after=7)
    run.generate(2)
    assert_succeeded(run)
    outcome = run.outcomes[0]
    assert outcome is not None
    assert outcome.commit is not None
    assert (outcome.step, outcome.commit.step) == (7, 7)
    assert read_audit(tmp_path / "audit").problems(7) == []


@pytest.mark.parametrize("strategy", ["ddp", "fsdp"])
def test_bf16_with_ranks_that_have_no_sample(strategy: str, tmp_path: Path, fork: Any) -> None:
    run = Run(tmp_path, fork, strategy=strategy, spec={"precision": "bf16"}, global_batch=2)
    run.generate(3, steps=6)
    assert_succeeded(run)
    assert all(value.dtype is torch.float32 for value in run.parameters().values())
    assert read_audit(tmp_path / "audit").problems(6) == []


def test_a_damaged_commit_is_passed_over_for_the_one_before(tmp_path: Path, fork: Any) -> None:
    run = Run(tmp_path, fork, interval="100steps")
    for step in (3, 9):
        run.generate(1, {0: {step: "drain"}})
        assert_drained(run)
    head = run.head()
    assert head is not None
    newest, before, *_ = head.commits
    (data,) = (tmp_path / "checkpoints" / newest.attempt).glob("*.data")
    content = bytearray(data.read_bytes())
    content[len(content) // 2] ^= 1
    data.write_bytes(content)

    # All that the operator knows is the damaged one.
    run.resume = CommitRef(
        generation=newest.generation,
        step=newest.step,
        manifest=newest.manifest,
        committed_at=datetime.fromisoformat(newest.committed_at),
    )
    run.generate(1, {0: {before.step + 1: "drain"}})
    assert assert_drained(run) < newest.step
    assert run.progress().start_step == before.step
    assert f"step {newest.step} is damaged, and training continues from" in (run.progress().message or "")

    run.generate(1)

    assert_succeeded(run)
    assert read_audit(tmp_path / "audit").problems(STEPS) == []


def test_a_save_that_cannot_end_before_the_deadline_is_not_begun(tmp_path: Path, fork: Any) -> None:
    run = Run(tmp_path, fork, interval="4steps", upload_seconds={4: 1.0, 8: 60.0})
    # Only rank 1 receives the notice, while the save of step 8 is under way, and only rank 0 knows what one takes.
    run.generate(2, {0: {6: "await"}, 1: {11: "notice 0.1"}})

    assert [outcome and outcome.kind for outcome in run.outcomes] == [OutcomeKind.DRAINED] * 2
    head = run.head()
    assert head is not None
    assert head.newest is not None
    assert head.newest.step == 4
    assert {path.name[:18] for path in (tmp_path / "checkpoints" / "attempts").iterdir()} <= {
        "g000001-s000000004",
        "g000001-s000000008",
    }
    messages = {run.progress(rank).message or "" for rank in range(2)}
    assert len(messages) == 1, "the operator shows any rank's"
    assert "was not committed before the end of this generation: a checkpoint takes about" in messages.pop()


def test_with_last_safe_the_ranks_train_on_until_just_before_the_deadline(tmp_path: Path, fork: Any) -> None:
    run = Run(tmp_path, fork, interval="4steps", checkpoint={"onNotice": "lastSafe"}, step_seconds=0.02)
    run.generate(2, {0: {6: "await"}, 1: {12: "notice 8"}}, steps=100_000)

    step = assert_drained(run)
    request = DrainRequest.read(run.run_dir(1) / "drain.json")
    progress = run.progress(1)
    assert request is not None
    assert progress.drain_seen_at is not None
    assert progress.commit is not None
    assert (progress.drain_seen_at - request.requested_at).total_seconds() > 1.0
    assert progress.commit.committed_at < request.deadline
    assert step > 12 + 25
    timings = run.progress(0).checkpoint
    assert timings is not None
    assert timings.forecast_seconds is not None


def test_while_a_ranks_node_is_at_risk_the_ranks_commit_more_often(tmp_path: Path, fork: Any) -> None:
    run = Run(tmp_path, fork, interval="1steps", step_seconds=0.02)
    run.generate(2, {0: {6: "await", 9: "drain"}})  # the drain's commit has the cost of those before
    assert_drained(run)
    run.interval = "auto"

    def explained() -> str:
        return run.progress().checkpoint_interval or ""

    with run.running(2, steps=100_000):
        file = run.run_dir(1) / FILE_AT_RISK
        wait_for(lambda: (run.run_dir(0) / "progress-0.json").exists(), "rank 0 reports")
        wait_for(lambda: "there was no interruption so far" in explained(), "rank 0 has resumed")
        file.touch()
        wait_for(lambda: "a member's node may be taken back soon" in explained(), "rank 0 knows of rank 1's node")
        file.unlink()
        wait_for(lambda: "there was no interruption so far" in explained(), "rank 0 knows that it's over")
        run.drain()
    assert_drained(run)


def test_what_is_wrong_is_said_in_a_sentence(tmp_path: Path, fork: Any) -> None:
    run = Run(tmp_path, fork)

    def failure_of(world_size: int = 1, faults: Faults | None = None) -> tuple[FailureReason, str]:
        (outcome, *_) = run.generate(world_size, faults)
        assert outcome is not None
        assert outcome.failure is not None
        return outcome.failure.reason, outcome.failure.message

    reason, message = failure_of(1, {0: {4: "raise"}})
    assert reason is FailureReason.SCRIPT_ERROR
    assert message.startswith("ValueError: the loss is purple")
    assert run.exit_codes == [1]

    reason, message = failure_of(1, {0: {4: "exit"}})
    assert (reason, run.exit_codes) == (FailureReason.SCRIPT_ERROR, [7])

    run.global_batch = 12
    reason, message = failure_of()
    assert reason is FailureReason.CHECKPOINT_INCOMPATIBLE
    assert "global_batch 10, and this run has global_batch 12" in message

    run.global_batch, run.strategy = 10, "zero"
    reason, message = failure_of()
    assert (reason, message) == (
        FailureReason.INVALID_CONFIGURATION,
        "strategy 'zero' is unknown; use auto, ddp, fsdp or deepspeed",
    )

    newest = run.progress().updated_at
    run.strategy = "ddp"
    run.resume = CommitRef(generation=1, step=9, manifest="gone", committed_at=newest)
    reason, message = failure_of()
    assert reason is FailureReason.CHECKPOINT_INCOMPATIBLE
    assert "has committed step 9" in message

    run.uri, run.resume = "ftp://somewhere/else", None
    reason, message = failure_of()
    assert reason is FailureReason.CHECKPOINT_ACCESS_DENIED
    assert "unknown scheme" in message
