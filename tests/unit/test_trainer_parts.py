"""The small parts of the trainer, each on its own."""

from __future__ import annotations

import json
import math
import multiprocessing
import os
import random
import re
import signal
import time
from collections.abc import Iterator
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import spottrain
from cluster_fixtures import wait_for
from full_disk import NO_SPACE, fill_disk
from spottrain.checkpoint.errors import CredentialsMissing, Fenced, StorageDenied, StorageUnavailable
from spottrain.data import random_state
from spottrain.data.batch import BatchPlan
from spottrain.engines.choice import choose_engine
from spottrain.engines.ddp import DdpEngine
from spottrain.engines.engine import EngineConfig
from spottrain.world.drain import DrainFlag
from spottrain.world.failures import Drained, UserError, as_user_errors, failure_of, start_error
from spottrain.world.progress import ProgressReporter
from spottrain.world.stop_agreement import Ballot, Decision, StopAgreement
from spottrain_api.contract.configuration import DrainRequest, TrainerConfig
from spottrain_api.contract.reports import FailureReason, Outcome, OutcomeKind
from spottrain_api.settings.choices import Sharding
from spottrain_api.settings.training import FsdpConfig

CPU = EngineConfig(device=torch.device("cpu"), plan=BatchPlan(global_batch=1, micro_batch=1, world_size=1))
SETTINGS: dict[str, Any] = {"job": "job", "generation": 1, "attemptId": "a", "batch": {"global": 1}}


@pytest.mark.parametrize(
    ("settings", "sentence"),
    [
        ({"strategy": "zero"}, "strategy 'zero' is unknown; use auto, ddp, fsdp or deepspeed"),
        ({"precision": "fp8"}, "precision 'fp8' is unknown; use fp32, bf16 or fp16"),
        ({"fsdp": {"sharding": "half"}}, "fsdp.sharding 'half' is unknown; use full or hybrid"),
        ({"checkpoint": {"onNotice": "never"}}, "checkpoint.onNotice 'never' is unknown; use immediate or lastSafe"),
        ({"stability": {"nonFinite": "pray"}}, "stability.nonFinite 'pray' is unknown; use fail, skip or rollback"),
        ({"batch": {"global": 0}}, "batch.global can't be read: input should be greater than or equal to 1"),
        ({"precision": "fp8", "seed": "x"}, "precision 'fp8' is unknown; use fp32, bf16 or fp16; seed can't be read"),
    ],
    ids=str,
)
def test_a_setting_that_is_not_known_is_refused_with_a_sentence(settings: dict[str, Any], sentence: str) -> None:
    with pytest.raises(UserError, match=re.escape(sentence)) as caught, as_user_errors():
        TrainerConfig.model_validate(SETTINGS | settings)
    assert caught.value.reason is FailureReason.INVALID_CONFIGURATION


def test_random_numbers_go_on_where_they_were_captured() -> None:
    def draw() -> tuple[float, ...]:
        return random.random(), np.random.normal(), np.random.random(), torch.rand(1).item()

    random_state.seed_everything(3, rank=1)
    np.random.normal()  # leaves half of a pair behind, which is state as well
    state = random_state.capture()
    expected = draw()
    random_state.seed_everything(3, rank=2)
    assert draw() != expected
    random_state.restore(state)
    assert draw() == expected


def test_a_world_of_one_agrees_with_itself_one_boundary_later() -> None:
    agreement = StopAgreement(None)
    assert agreement.read() == Decision()
    agreement.start(Ballot(drain=True, loss=2.5, has_loss=True))
    assert agreement.read() == Decision(drain=True, loss=2.5)
    assert agreement.settle(Ballot(commit=True, save_seconds=1.5)) == Decision(commit=True, save_seconds=1.5)
    assert agreement.settle(Ballot(save_failed=True)) == Decision(save_failed=True)
    assert agreement.settle(Ballot(at_risk=True)) == Decision(at_risk=True)
    assert agreement.least(3.5) == 3.5


def test_a_risk_is_seen_in_the_run_directory_while_it_lasts(tmp_path: Path) -> None:
    flag = DrainFlag(tmp_path)
    assert not flag.is_at_risk()
    (tmp_path / "at-risk").touch()
    assert flag.is_at_risk()
    assert not flag.is_set()
    (tmp_path / "at-risk").unlink()
    assert not flag.is_at_risk()
    assert not DrainFlag(None).is_at_risk()


def test_a_drain_is_seen_in_the_run_directory(tmp_path: Path) -> None:
    flag = DrainFlag(tmp_path)
    assert not flag.is_set()
    now = datetime.now(UTC)
    DrainRequest(reason="", deadline=now + timedelta(seconds=50), requested_at=now).write(tmp_path / "drain.json")
    assert flag.is_set()
    assert 40 < flag.seconds_left() <= 50


@pytest.mark.parametrize("jump", [timedelta(hours=5), timedelta(hours=-5)], ids=["forward", "back"])
def test_a_deadline_does_not_move_with_the_clock(tmp_path: Path, jump: timedelta) -> None:
    wall, passed = datetime.now(UTC), 0.0
    flag = DrainFlag(tmp_path, now=lambda: wall, monotonic=lambda: passed)
    deadline = wall + timedelta(seconds=50)
    request = DrainRequest(reason="", deadline=deadline, requested_at=wall, is_preemption=True)
    request.write(tmp_path / "drain.json")
    assert not flag.is_set(last_safe_seconds=30)
    wall, passed = wall + jump, 15.0
    assert not flag.is_set(last_safe_seconds=30)
    assert flag.seconds_left() == 35
    passed = 20.0
    assert flag.is_set(last_safe_seconds=30)
    # A deadline that is sent anew is one of the sender's clock.
    request.model_copy(update={"deadline": wall + timedelta(seconds=5)}).write(tmp_path / "drain.json")
    assert flag.seconds_left() == 5


def test_a_preemption_waits_for_the_last_safe_moment_and_other_drains_do_not(tmp_path: Path) -> None:
    now = datetime.now(UTC)
    path = tmp_path / "drain.json"
    notice = DrainRequest(
        reason="ec2: preempt", deadline=now + timedelta(seconds=50), requested_at=now, is_preemption=True
    )
    notice.write(path)
    seen: list[datetime] = []
    flag = DrainFlag(tmp_path, on_seen=seen.append)
    assert not flag.is_set(last_safe_seconds=30)
    path.unlink()  # taken back
    assert not flag.is_set()
    notice.write(path)
    assert not flag.is_set(last_safe_seconds=30)
    assert not seen
    assert flag.is_set(last_safe_seconds=51)
    assert flag.is_set(last_safe_seconds=51)
    assert len(seen) == 1
    notice.model_copy(update={"is_preemption": False}).write(path)
    assert DrainFlag(tmp_path).is_set(last_safe_seconds=30)


@pytest.fixture
def _sigterm_as_before() -> Iterator[None]:
    before = signal.getsignal(signal.SIGTERM)
    yield
    signal.signal(signal.SIGTERM, before)


@pytest.mark.usefixtures("_sigterm_as_before")
def test_sigterm_asks_for_a_drain() -> None:
    flag = DrainFlag(None)
    flag.catch_sigterm()
    assert not flag.is_set()
    signal.raise_signal(signal.SIGTERM)
    assert flag.is_set()
    assert flag.seconds_left() == math.inf


@pytest.mark.usefixtures("_sigterm_as_before")
def test_sigterm_ends_a_process_that_the_script_forks() -> None:
    flag = DrainFlag(None)
    flag.catch_sigterm()
    forking = multiprocessing.get_context("fork")
    runs = forking.Event()

    def run() -> None:
        runs.set()
        while True:
            time.sleep(0.01)

    process = forking.Process(target=run, daemon=True)
    process.start()
    assert runs.wait(timeout=30)
    process.terminate()
    process.join(timeout=30)
    process.kill()
    assert process.exitcode == -signal.SIGTERM
    assert not flag.is_set()


def test_a_full_disk_keeps_progress_from_the_agent_and_training_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    fill_disk(monkeypatch)
    reporter = ProgressReporter(tmp_path, local_rank=0, generation=1)
    for name in ("session_started", "prepared"):
        reporter.milestone(name)
    reporter.finish(OutcomeKind.DRAINED)
    assert [record.message for record in caplog.records] == [
        f"Progress is not reported, and training goes on: {NO_SPACE}: '{tmp_path}/.progress-0.json.{os.getpid()}'"
    ]
    assert list(tmp_path.iterdir()) == [], "half a file would fill it further"
    monkeypatch.undo()
    reporter.milestone("loaded")
    assert (tmp_path / "progress-0.json").read_text() == reporter.progress.to_json()


def test_progress_and_outcome_are_left_for_the_agent(tmp_path: Path) -> None:
    reporter = ProgressReporter(tmp_path, local_rank=1, generation=4, peak_memory=lambda: 2**20)
    path = tmp_path / "progress-1.json"
    reporter.milestone("prepared")
    assert path.read_text() == reporter.progress.to_json()
    reporter.observe_loss(float("nan"))
    reporter.step(
        11, seconds=0.5, data_wait_seconds=0.1, tokens=800, samples=8, facts=lambda: {"undecodable_samples": 3}
    )
    wait_for(lambda: path.read_text() == reporter.progress.to_json(), "a step is written beside the training")
    progress = reporter.progress
    assert (progress.generation, progress.step, progress.loss) == (4, 11, None)
    assert (progress.tokens_per_second, progress.samples_per_second, progress.undecodable_samples) == (1600, 16, 3)
    assert (progress.data_wait_seconds, progress.waited_seconds, progress.memory_bytes) == (0.1, 0.0, 2**20)
    assert progress.milestones.keys() == {"prepared", "first_step"}
    for step in (12, 13):
        reporter.step(step, seconds=0.5, data_wait_seconds=0.25, tokens=800)
    assert reporter.progress.waited_seconds == 0.5  # since the first step, which belongs to the start
    reporter.finish(OutcomeKind.SUCCEEDED)
    outcome = Outcome.read(tmp_path / "outcome-1.json")
    assert outcome is not None
    assert (outcome.generation, outcome.kind, outcome.step) == (4, OutcomeKind.SUCCEEDED, 13)


@pytest.mark.parametrize(
    ("error", "reason", "message"),
    [
        (SystemExit(3), FailureReason.SCRIPT_ERROR, "The script ended with exit code 3."),
        (SystemExit("no data"), FailureReason.SCRIPT_ERROR, "The script ended with exit code 1: no data."),
        (KeyError("weight"), FailureReason.SCRIPT_ERROR, "KeyError: 'weight'"),
        (
            RuntimeError("[gloo/transport] Connection closed by peer"),
            FailureReason.LOST_PEER,
            "The rank lost another rank (Connection closed by peer)",
        ),
        (Fenced("Generation 1 may not commit.", 2), FailureReason.LOST_PEER, "Generation 1 may not commit."),
        (StorageUnavailable("It is full."), FailureReason.SCRIPT_ERROR, "It is full."),
        (KeyboardInterrupt(), FailureReason.KILLED, "The script was interrupted."),
    ],
)
def test_an_exception_becomes_a_reason_and_a_sentence(
    error: BaseException, reason: FailureReason, message: str
) -> None:
    failure = failure_of(error, rank=2)
    assert failure is not None
    assert (failure.reason, failure.rank) == (reason, 2)
    assert failure.message.startswith(message)


def test_the_traceback_of_a_failure_starts_in_the_script() -> None:
    session: dict[str, Any] = {}
    code = "def entry(script):\n    script()\n"
    exec(compile(code, str(Path(spottrain.__file__).parent / "loop/entry.py"), "exec"), session)

    def script() -> None:
        raise ValueError("x")

    with pytest.raises(ValueError, match="x") as raised:
        session["entry"](script)
    error = raised.value
    assert error.__traceback__ is not None
    failure = failure_of(error.with_traceback(error.__traceback__.tb_next), rank=0)
    assert failure is not None
    assert failure.traceback is not None
    assert "entry.py" not in failure.traceback
    assert failure.traceback.splitlines()[0].endswith("in script")


def test_a_failure_of_the_script_carries_the_end_of_its_traceback() -> None:
    empty: dict[str, int] = {}
    with pytest.raises(KeyError) as raised:
        empty["weight"]
    failure = failure_of(raised.value, rank=0)
    assert failure is not None
    assert '    empty["weight"]' in (failure.traceback or "").splitlines()


def test_out_of_memory_says_what_to_change() -> None:
    failure = failure_of(torch.OutOfMemoryError("CUDA out of memory."), rank=0)
    assert failure is not None
    assert failure.message.startswith("torch.OutOfMemoryError: CUDA out of memory. Lower batch.micro")


def test_parameters_without_a_part_in_the_loss_are_reported_in_a_sentence() -> None:
    """Torch names an argument of DistributedDataParallel, which scripts don't make."""
    model = nn.ModuleList([nn.Linear(1, 1), nn.Linear(1, 1)])
    model.forward = lambda x: model[0](x)
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)  # type: ignore[attr-defined]
    try:
        ddp = DistributedDataParallel(model)
        ddp(torch.ones(1)).sum().backward()
        with pytest.raises(RuntimeError) as raised:
            ddp(torch.ones(1))
    finally:
        dist.destroy_process_group()
    failure = failure_of(raised.value, rank=0)
    assert failure is not None
    assert failure.message.startswith("Some of the model's parameters had no part in the loss on a rank")


@pytest.mark.parametrize("error", [SystemExit(), SystemExit(0), Drained()])
def test_a_normal_exit_is_no_failure(error: BaseException) -> None:
    assert failure_of(error, rank=0) is None


def test_an_outage_is_final_only_for_a_job_that_never_committed() -> None:
    outage, denied = StorageUnavailable("No answer."), StorageDenied("No bucket.")
    assert start_error(outage, resumes=False).reason is FailureReason.CHECKPOINT_STORAGE_UNAVAILABLE
    assert start_error(outage, resumes=True).reason is FailureReason.START_FAILED
    assert start_error(denied, resumes=True).reason is FailureReason.CHECKPOINT_ACCESS_DENIED


def test_credentials_that_are_missing_deny_access_only_to_a_job_that_never_committed() -> None:
    missing = CredentialsMissing("No credentials.")
    assert start_error(missing, resumes=False).reason is FailureReason.CHECKPOINT_ACCESS_DENIED
    assert start_error(missing, resumes=True).reason is FailureReason.START_FAILED


def test_strategies_are_chosen_by_name() -> None:
    assert isinstance(choose_engine("ddp", CPU), DdpEngine)
    assert type(choose_engine("fsdp", CPU)).__name__ == "FsdpEngine"
    with pytest.raises(ValueError, match="1 ranks are not a multiple of 2"):
        choose_engine("fsdp", replace(CPU, fsdp=FsdpConfig(sharding=Sharding.HYBRID), local_world_size=2))
    for strategy in ("ddp", "fsdp"):
        with pytest.raises(ValueError, match="precision fp16 needs the strategy deepspeed"):
            choose_engine(strategy, replace(CPU, precision=torch.float16))
    with pytest.raises(ValueError, match="strategy 'zero' is unknown; use auto, ddp, fsdp or deepspeed"):
        choose_engine("zero", CPU)


def test_the_outcome_of_settings_that_are_not_known_is_that_of_their_generation(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An agent passes over the outcome of any other."""
    (tmp_path / "run.json").write_text(json.dumps(SETTINGS | {"generation": 7, "strategy": "zero"}))
    monkeypatch.setenv("SPOTTRAIN_RUN_DIR", str(tmp_path))
    with pytest.raises(SystemExit), spottrain.session():
        pass
    outcome = Outcome.read(tmp_path / "outcome-0.json")
    assert outcome is not None
    assert outcome.failure is not None
    assert (outcome.generation, outcome.failure.reason) == (7, FailureReason.INVALID_CONFIGURATION)
    assert outcome.failure.message == "strategy 'zero' is unknown; use auto, ddp, fsdp or deepspeed"


def test_a_second_session_is_refused_as_it_would_resume_from_the_first(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "outcome-0.json"
    Outcome(generation=1, kind=OutcomeKind.SUCCEEDED, step=7).write(path)
    monkeypatch.setenv("SPOTTRAIN_RUN_DIR", str(tmp_path))
    with pytest.raises(SystemExit), spottrain.session():
        pass
    outcome = Outcome.read(path)
    assert outcome is not None
    assert outcome.failure is not None
    assert outcome.failure.reason is FailureReason.INVALID_CONFIGURATION
    assert outcome.failure.message.startswith("the script opened a second spottrain.session()")
