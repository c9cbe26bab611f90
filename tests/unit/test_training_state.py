"""The parts of a run's state besides tensors, after a resume."""

from __future__ import annotations

import logging
import math
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer
from torch.optim.lr_scheduler import (
    LambdaLR,
)

import spottrain
from one_rank_runs import STEPS, train
from spottrain.engines.buffers import check_buffers
from spottrain.schedules import warmup_cosine
from spottrain.world.failures import Drained, UserError
from spottrain_api.settings.choices import StabilityAction
from spottrain_api.settings.stability import StabilityConfig

pytestmark = pytest.mark.usefixtures("world_of_its_own")


class Best:
    """Variables of a script."""

    def __init__(self, loss: float = math.inf, steps: tuple[int, ...] = ()) -> None:
        self.loss = loss
        self.steps = steps

    def state_dict(self) -> dict[str, Any]:
        return {"loss": self.loss, "steps": self.steps}

    def load_state_dict(self, state_dict: dict[str, Any], /) -> None:
        self.loss, self.steps = state_dict["loss"], state_dict["steps"]


class Renamed(Best):
    def load_state_dict(self, state_dict: dict[str, Any], /) -> None:
        self.loss = state_dict["best"]


@pytest.mark.parametrize("strategy", ["ddp", "fsdp"])
def test_variables_of_the_script_are_committed_and_restored(strategy: str, tmp_path: Path) -> None:
    train(f"file://{tmp_path}", None, 2, strategy, stateful={"best": Best(0.25, (1, 2))})
    again = Best()
    train(f"file://{tmp_path}", None, 3, strategy, stateful={"best": again})
    assert (again.loss, again.steps) == (0.25, (1, 2))


class Buffer:
    """A replay buffer of 4 MiB, with an average in shards beside it if `weights` are."""

    def __init__(self, weights: torch.Tensor | None = None) -> None:
        self.arrays: dict[str, np.ndarray[Any, Any]] = {
            "seen": np.zeros((1 << 16, 8), np.float32),
            "empty": np.zeros((0, 3)),
        }
        self.average = None if weights is None else torch.zeros_like(weights)

    def state_dict(self) -> dict[str, Any]:
        return {"arrays": self.arrays, "half": torch.zeros(1 << 20, dtype=torch.bfloat16), "average": self.average}

    def load_state_dict(self, state_dict: dict[str, Any], /) -> None:
        self.arrays, self.average = state_dict["arrays"], state_dict["average"]


@pytest.mark.parametrize("strategy", ["ddp", "fsdp"])
def test_variables_of_the_script_may_be_large_and_in_shards(strategy: str, tmp_path: Path) -> None:
    found = []
    for last in (2, 4):
        buffer = Buffer()
        with spottrain.session(strategy=strategy, global_batch=4, checkpoint_uri=f"file://{tmp_path}") as session:
            training = session.prepare(
                nn.Linear(4, 1), optimizer=sgd, dataset=[torch.ones(4)] * 8, stateful={"buffer": buffer}
            )
            [weight, _] = training.model.parameters()
            buffer.average = torch.zeros_like(weight)
            for step in training.steps(total=last):
                found.append((buffer.arrays["seen"][:, 0].sum(), type(buffer.average), buffer.arrays["empty"].shape))
                for batch in step.micro_batches():
                    step.backward(training.model(batch).sum())
                step.update()
                buffer.arrays["seen"][:, 0] = step.number
    kind = DTensor if strategy == "fsdp" else torch.Tensor
    assert found[2] == (2 * (1 << 16), kind, (0, 3))


def test_a_commit_without_variables_of_the_script_says_that_they_start_afresh(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    train(f"file://{tmp_path}", None, 2)
    train(f"file://{tmp_path}", None, 3, stateful={"best": Best(), "also": Best()})
    assert "The checkpoint at step 2 holds no state of also, best (stateful), which starts afresh." in caplog.text


def test_variables_of_the_script_with_another_structure_are_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    train(f"file://{tmp_path}", None, 2, stateful={"best": Best()})
    with pytest.raises(SystemExit, match="1"):
        train(f"file://{tmp_path}", None, 3, stateful={"best": Renamed()})
    said = "The checkpoint at step 2 holds a state of best (stateful) that can't be loaded: KeyError('best')."
    assert f"spottrain: {said}" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("stateful", "said"),
    [
        pytest.param({"best": {"loss": 1.0}}, "best (dict) has no state_dict and load_state_dict", id="dict"),
        pytest.param({"best": Best(math.inf, {1})}, "'stateful.best.steps' is a builtins.set", id="set"),  # type: ignore[arg-type]
        pytest.param({"stability": Best()}, "the name stability is taken", id="name"),
    ],
)
def test_variables_that_cannot_be_committed_are_refused_at_once(
    stateful: dict[str, Any], said: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit, match="1"):
        train(f"file://{tmp_path}", None, 2, stateful=stateful)
    assert said in capsys.readouterr().err


@pytest.mark.parametrize("strategy", ["ddp", "fsdp"])
@pytest.mark.parametrize(
    "make",
    [
        lambda: torch.ones(1).expand(4),
        lambda: torch.eye(4).to_sparse(),
        lambda: torch.nested.nested_tensor([torch.ones(2), torch.ones(3)], layout=torch.jagged),
        lambda: torch.ones(4, dtype=torch.complex64).conj(),
    ],
    ids=["expanded", "sparse", "nested", "conjugate"],
)
def test_a_buffer_that_ranks_cannot_send_is_refused_by_its_name(
    make: Callable[[], torch.Tensor], strategy: str, capsys: pytest.CaptureFixture[str]
) -> None:
    model = nn.Sequential(nn.Linear(1, 1))
    model[0].register_buffer("mask", make())
    with pytest.raises(SystemExit, match="1"), spottrain.session(strategy=strategy) as session:
        session.prepare(model, optimizer=sgd, dataset=[torch.ones(1)] * 32)
    said = capsys.readouterr().err
    assert "the buffer 0.mask is more than a plain tensor" in said
    assert "Register what .clone() or .to_dense() makes of it, or pass persistent=False" in said


@pytest.mark.parametrize("strategy", ["ddp", "fsdp"])
@pytest.mark.parametrize("dtype", [torch.int16, torch.uint16, torch.uint32, torch.float8_e4m3fn])
def test_buffers_and_frozen_weights_may_be_of_any_type(dtype: torch.dtype, strategy: str) -> None:
    model = nn.Linear(1, 1)
    model.register_buffer("codes", torch.ones(2).to(dtype))
    model.base = nn.Parameter(torch.ones(()).to(dtype), requires_grad=False)
    with spottrain.session(strategy=strategy, global_batch=4, micro_batch=4) as session:
        training = session.prepare(model, optimizer=sgd, dataset=[torch.ones(1)] * 32)
        assert training.full_state_dict()["codes"].dtype == dtype


class Unsteady(nn.Linear):
    """Its first forward pass changes its buffers."""

    def __init__(self, change: Callable[[nn.Module], None]) -> None:
        super().__init__(4, 1)
        self.change = change
        self.register_buffer("seen", torch.ones(2))
        self.register_buffer("empty", None)

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        self.change(self)
        return super().forward(input)


CHANGES: dict[str, tuple[Callable[[nn.Module], None], str]] = {
    "new": (lambda model: model.register_buffer("late", torch.ones(2)), "late of the model was not there at first"),
    "value": (lambda model: setattr(model, "empty", torch.ones(2)), "empty of the model was not there at first"),
    "none": (lambda model: setattr(model, "seen", None), "was float32 [2] at first, and is not there now"),
    "length": (lambda model: setattr(model, "seen", torch.ones(3)), "is float32 [3] now"),
    "type": (lambda model: setattr(model, "seen", torch.ones(2).double()), "is float64 [2] now"),
}


@pytest.mark.parametrize(("change", "said"), CHANGES.values(), ids=CHANGES)
def test_a_buffer_that_a_resume_could_not_load_ends_the_first_step(
    change: Callable[[nn.Module], None], said: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit, match="1"):
        train(f"file://{tmp_path}", None, 1, model=Unsteady(change))
    assert said in capsys.readouterr().err
    assert not [*tmp_path.rglob("manifest.json")], "nothing is committed"


def test_a_late_buffer_that_no_commit_holds_does_no_harm(tmp_path: Path) -> None:
    def add(model: nn.Module) -> None:
        model.register_buffer("late", torch.ones(2), persistent=False)

    train(f"file://{tmp_path}", None, 1, model=Unsteady(add))
    train(f"file://{tmp_path}", None, 2, model=Unsteady(add))


def test_buffers_without_values_are_left_alone() -> None:
    model = nn.Sequential(nn.LazyBatchNorm1d(affine=False), nn.Linear(1, 1))  # the first values come with a sample
    model[1].register_buffer("expanded", torch.ones(1).expand(0))
    model[1].register_buffer("sparse", torch.empty(0, 3).to_sparse())
    check_buffers(model)


class Decay:
    """A factor of the learning rate, with a state of its own."""

    def __init__(self, steps: Any) -> None:
        self.steps = steps

    def __call__(self, step: int) -> float:
        return 0.5 if step in self.steps else 1.0


def test_a_schedule_that_cannot_be_committed_is_refused_at_once(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit, match="1"):
        train(f"file://{tmp_path}", lambda optimizer: LambdaLR(optimizer, Decay({2})), 2)
    assert "'scheduler.lr_lambdas.0.steps' is a builtins.set" in capsys.readouterr().err


@pytest.fixture
def _sigterm_as_before() -> Iterator[None]:
    before = signal.getsignal(signal.SIGTERM)
    yield
    signal.signal(signal.SIGTERM, before)


def spoil_and_drain(folder: Path, best: Best, spoilt: int, drained: int | None) -> list[int]:
    """Steps of a run whose variables can't be committed from step `spoilt` on, and that drains in step `drained`."""
    done: list[int] = []
    with spottrain.session(global_batch=1, micro_batch=1, checkpoint_uri=f"file://{folder}") as session:
        training = session.prepare(
            nn.Linear(1, 1), optimizer=sgd, dataset=[torch.ones(1)] * 8, stateful={"best": best}
        )
        for step in training.steps(total=8):
            done.append(step.number)
            for batch in step.micro_batches():
                step.backward(training.model(batch).sum())
            step.update()
            if step.number == spoilt:
                best.steps = {spoilt}  # type: ignore[assignment]
            if step.number == drained:
                signal.raise_signal(signal.SIGTERM)
    return done


def test_variables_that_cannot_be_committed_end_the_run_after_its_first_step(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit, match="1"):
        spoil_and_drain(tmp_path, Best(), 1, None)
    assert "'stateful.best.steps' is a builtins.set" in capsys.readouterr().err


@pytest.mark.usefixtures("_sigterm_as_before")
def test_variables_that_can_no_longer_be_committed_are_left_out_at_the_drain(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """To fail would lose the steps since the newest commit, and with them those of each generation."""
    with pytest.raises(Drained):
        spoil_and_drain(tmp_path, Best(), 3, 3)
    said = [record.getMessage() for record in caplog.records]
    assert any(
        "of step 4 is without the state of best (stateful), which a resume would start afresh. The state at "
        "'stateful.best.steps' is a builtins.set" in each
        for each in said
    )
    caplog.clear()
    assert spoil_and_drain(tmp_path, Best(), 9, None) == [5, 6, 7, 8]
    assert "holds no state of best (stateful), which starts afresh" in caplog.text


def test_the_step_counts_as_completed_after_its_update() -> None:
    """Where a script asks whether an evaluation is due."""
    counts: list[tuple[int, int, int]] = []
    with spottrain.session(strategy="ddp", global_batch=4, micro_batch=4) as session:
        training = session.prepare(
            nn.Linear(4, 1),
            optimizer=lambda model: torch.optim.SGD(model.parameters(), 0.1),
            dataset=[torch.ones(4)] * 8,
        )
        for step in training.steps(total=2):
            for batch in step.micro_batches():
                step.backward(training.model(batch).mean())
            before = training.step
            step.update()
            counts.append((step.number, before, training.step))
    assert counts == [(1, 0, 1), (2, 1, 2)]


@pytest.mark.parametrize("strategy", ["ddp", "fsdp"])
def test_parameters_that_the_optimizer_does_not_have_keep_no_gradients(strategy: str) -> None:
    """They would add up, and one that is not finite would spoil all steps."""
    stability = StabilityConfig(non_finite=StabilityAction.SKIP)
    kept: list[bool] = []
    with spottrain.session(strategy=strategy, global_batch=1, micro_batch=1, stability=stability) as session:
        training = session.prepare(
            nn.Sequential(nn.Linear(1, 1), nn.Linear(1, 1)),
            optimizer=lambda model: torch.optim.SGD([*model.parameters()][2:], lr=0.1),
            dataset=[torch.ones(1)] * 8,
        )
        for step in training.steps(total=2):
            for batch in step.micro_batches():
                step.backward(training.model(batch).sum() * (math.nan if step.number == 2 else 1.0))
            step.update()
            kept += [parameter.grad is not None for parameter in training.model.parameters()]
        skipped_steps = session._context.reporter.progress.skipped_steps
    assert kept == [False] * 8
    assert skipped_steps == 1


def test_what_has_changed_since_the_commit_is_one_message(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """The status shows the newest message alone."""
    train(f"file://{tmp_path}", warmup_cosine(total=STEPS), STEPS)
    train(f"file://{tmp_path}", warmup_cosine(total=STEPS + 2), STEPS + 2, strategy="fsdp")
    warnings = [record.getMessage() for record in caplog.records if record.levelno == logging.WARNING]
    [message] = [warning for warning in warnings if "The checkpoint at step" in warning]
    assert "with the strategy ddp" in message
    assert f"of a run of {STEPS} steps" in message


def test_a_resume_says_from_where(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    uri = f"file://{tmp_path}"
    train(uri, None, 2)
    assert "resumed" not in capsys.readouterr().err
    train(uri, None, 3)
    assert f"spottrain: resumed from step 2 of {uri}\n" in capsys.readouterr().err


@pytest.mark.parametrize("differing", [["seed"], ["seed", "global_batch"]], ids=" and ".join)
def test_all_that_a_run_must_not_change_is_in_one_sentence(
    differing: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    settings = {"seed": 1, "global_batch": 4}
    other = {**settings, **{name: settings[name] + 1 for name in differing}}

    def run(seed: int, global_batch: int) -> None:
        with spottrain.session(
            strategy="ddp", micro_batch=4, seed=seed, global_batch=global_batch, checkpoint_uri=f"file://{tmp_path}"
        ) as session:
            training = session.prepare(
                nn.Linear(4, 1),
                optimizer=lambda model: torch.optim.SGD(model.parameters(), 0.1),
                dataset=[torch.ones(4)] * 8,
            )
            for step in training.steps(total=1):
                for batch in step.micro_batches():
                    step.backward(training.model(batch).mean())
                step.update()

    run(**settings)
    saved, here = (" and ".join(f"{name} {each[name]}" for name in differing) for each in (settings, other))
    back = "it" if len(differing) == 1 else "them"
    with pytest.raises(SystemExit, match="1"):
        run(**other)
    said = (
        f"The checkpoint at step 1 was made with {saved}, and this run has {here}. Set {back} back, or create a new "
        "job with a different checkpoint.uri."
    )
    assert f"spottrain: {said}" in capsys.readouterr().err


@pytest.mark.parametrize("stability", [None, StabilityConfig(non_finite=StabilityAction.SKIP)], ids=["none", "skip"])
@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_losses_that_are_not_finite_are_reported_once(
    bad: float, stability: StabilityConfig | None, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with spottrain.session(strategy="ddp", global_batch=4, micro_batch=4, stability=stability) as session:
        training = session.prepare(
            nn.Linear(4, 1),
            optimizer=lambda model: torch.optim.SGD(model.parameters(), 0.0),
            dataset=[torch.ones(4)] * 8,
        )
        for step in training.steps(total=4):
            for batch in step.micro_batches():
                step.backward(training.model(batch).abs().mean() * bad)
            step.update()
    warned = [message for message in caplog.messages if "steps are not judged" in message]
    if stability is not None:
        assert warned == []
        return
    [message] = warned
    assert message.startswith(f"The loss was {bad} at about step 2")
    assert "set stability.nonFinite: skip" in message
    assert session._context.reporter.progress.message == message


def test_a_script_that_leaves_the_loop_early_says_so(capsys: pytest.CaptureFixture[str]) -> None:
    with spottrain.session(strategy="ddp", global_batch=4, micro_batch=4) as session:
        training = session.prepare(
            nn.Linear(4, 1),
            optimizer=lambda model: torch.optim.SGD(model.parameters(), 0.1),
            dataset=[torch.ones(4)] * 8,
        )
        for step in training.steps(total=5):
            for batch in step.micro_batches():
                step.backward(training.model(batch).mean())
            step.update()
            if step.number == 2:
                break
    warned = "spottrain: the script ended training at step 2 of 5, before the last step, as with early stopping\n"
    assert warned in capsys.readouterr().err


def test_a_second_loop_is_refused_before_it_repeats_steps(tmp_path: Path) -> None:
    with spottrain.session(global_batch=1, micro_batch=1, checkpoint_uri=f"file://{tmp_path}") as session:
        training = session.prepare(nn.Linear(1, 1), optimizer=sgd, dataset=[torch.ones(1)])
        for step in training.steps(total=2):
            for batch in step.micro_batches():
                step.backward(training.model(batch).sum())
            step.update()
        with pytest.raises(UserError, match=r"training\.steps is a second loop.* inside it"):
            next(training.steps(total=4))
        assert training.step == 2


def sgd(model: nn.Module) -> Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.1)
