"""Schedules of the learning rate after a resume."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import (
    ChainedScheduler,
    CosineAnnealingLR,
    CyclicLR,
    LambdaLR,
    LinearLR,
    LRScheduler,
    MultiStepLR,
    SequentialLR,
    StepLR,
)

from one_rank_runs import STEPS, train
from spottrain.schedules import warmup_cosine

pytestmark = pytest.mark.usefixtures("world_of_its_own")


class Restarts(LRScheduler):
    """Restarts between rates of its own, as of the package cosine-annealing-warmup."""

    def __init__(self, optimizer: Optimizer, *, steps: int, max_lr: float, min_lr: float) -> None:
        self.steps, self.max_lr = steps, max_lr
        super().__init__(optimizer)
        self.base_lrs = [min_lr] * len(optimizer.param_groups)

    def get_lr(self) -> list[float | torch.Tensor]:
        part = (1 + math.cos(math.pi * (self.last_epoch % self.steps) / self.steps)) / 2
        return [lowest + part * (self.max_lr - lowest) for lowest in self.base_lrs]


def warmup_and_cycles(optimizer: Optimizer) -> LRScheduler:
    """LinearLR scales the optimizer's rate, and CyclicLR has rates of its own."""
    warmup = LinearLR(optimizer, 0.1, total_iters=2)
    return SequentialLR(optimizer, [warmup, CyclicLR(optimizer, 0.001, 0.1, step_size_up=3)], [2])


def restarts(optimizer: Optimizer) -> LRScheduler:
    return Restarts(optimizer, steps=4, max_lr=0.1, min_lr=0.001)


@pytest.mark.parametrize(
    "schedule",
    [
        lambda optimizer: CosineAnnealingLR(optimizer, 17),
        lambda optimizer: SequentialLR(
            optimizer, [LinearLR(optimizer, 0.3, total_iters=3), CosineAnnealingLR(optimizer, 17)], [2]
        ),
        lambda optimizer: SequentialLR(
            optimizer, [LinearLR(optimizer, 0.3, total_iters=3), MultiStepLR(optimizer, [1])], [4]
        ),
        warmup_and_cycles,
        restarts,
    ],
    ids=["cosine", "sequence", "milestones", "cycles", "restarts"],
)
def test_schedules_of_learning_rates_that_are_tensors_go_on_bit_for_bit(
    schedule: Callable[[Optimizer], LRScheduler], tmp_path: Path
) -> None:
    steady = train(f"file://{tmp_path}/steady", schedule, STEPS)
    train(f"file://{tmp_path}/resumed", schedule, STEPS // 2)
    assert torch.equal(train(f"file://{tmp_path}/resumed", schedule, STEPS), steady)


@pytest.mark.parametrize(
    ("has_schedule", "length", "said"),
    [
        pytest.param(True, STEPS + 2, [f"is of a run of {STEPS} steps, and this run has {STEPS + 2}"], id="longer"),
        pytest.param(True, STEPS, [], id="as-long"),
        pytest.param(False, STEPS + 2, [], id="no-schedule"),
    ],
)
def test_a_run_that_resumes_with_another_length_says_what_becomes_of_its_learning_rates(
    has_schedule: bool, length: int, said: list[str], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    for last in (STEPS, length):
        train(f"file://{tmp_path}", warmup_cosine(total=last) if has_schedule else None, last)
    warnings = [record.getMessage() for record in caplog.records if record.levelno == logging.WARNING]
    found = [message for message in warnings if "Learning rates" in message]
    assert len(found) == len(said)
    assert all(sentence in message for sentence, message in zip(said, found, strict=True))


@pytest.mark.parametrize("rate", [0.25, torch.tensor(0.25)], ids=["number", "tensor"])
def test_a_schedule_that_a_run_gains_says_where_it_starts(
    rate: float | torch.Tensor, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    for last, schedule in ((2, None), (3, warmup_cosine(total=4))):
        train(f"file://{tmp_path}", schedule, last, make=lambda weights: torch.optim.AdamW(weights, rate))
    said = "The checkpoint at step 2 was made without a schedule, and the script's schedule starts at its own step 0."
    assert said in caplog.text


def sequence(optimizer: Optimizer) -> LRScheduler:
    return SequentialLR(optimizer, [LinearLR(optimizer), StepLR(optimizer, 3)], [4])


def other_sequence(optimizer: Optimizer) -> LRScheduler:
    return SequentialLR(optimizer, [warmup_cosine(total=STEPS)(optimizer), StepLR(optimizer, 3)], [4])


@pytest.mark.parametrize(
    ("before", "name"),
    [(lambda optimizer: CosineAnnealingLR(optimizer, 4), "CosineAnnealingLR"), (sequence, "SequentialLR")],
    ids=["cosine", "sequence"],
)
def test_a_schedule_of_another_class_continues_at_the_step_of_the_commit(
    before: Callable[[Optimizer], LRScheduler], name: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """From the second step after the resume on; the first has the rate of the commit."""
    rates: list[float] = []

    def make(weights: Iterator[nn.Parameter]) -> Optimizer:
        optimizer = torch.optim.AdamW(weights, 0.5)
        optimizer.register_step_pre_hook(lambda *_: rates.append(optimizer.param_groups[0]["lr"]))
        return optimizer

    train(f"file://{tmp_path}", before, 2, make=make)
    train(f"file://{tmp_path}", lambda optimizer: LambdaLR(optimizer, lambda step: 0.5**step), 5, make=make)
    assert rates[-2:] == [0.5 * 0.5**3, 0.5 * 0.5**4]
    assert f"made with the schedule {name}, and the script's LambdaLR continues from there." in caplog.text


@pytest.mark.parametrize(
    ("before", "now", "said"),
    [
        pytest.param(
            lambda optimizer: StepLR(optimizer, 3),
            sequence,
            "was made with the schedule StepLR, from which the script's SequentialLR can't continue. Use a LambdaLR",
            id="class",
        ),
        pytest.param(
            lambda optimizer: ChainedScheduler([StepLR(optimizer, 3)]),
            lambda optimizer: StepLR(optimizer, 3),
            "was made with the schedule ChainedScheduler, from which the script's StepLR can't continue. Set the",
            id="chain",
        ),
        pytest.param(
            sequence,
            other_sequence,
            "holds a state of the schedule that can't be loaded: KeyError('lr_lambdas'). Set the schedule back, or",
            id="parts",
        ),
    ],
)
def test_a_schedule_that_cannot_continue_from_that_of_the_commit_is_refused(
    before: Callable[[Optimizer], LRScheduler],
    now: Callable[[Optimizer], LRScheduler],
    said: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    train(f"file://{tmp_path}", before, 2)
    with pytest.raises(SystemExit, match="1"):
        train(f"file://{tmp_path}", now, 4)
    assert f"spottrain: The checkpoint at step 2 {said}" in capsys.readouterr().err


def test_a_schedule_of_another_class_keeps_base_rates_of_its_own(tmp_path: Path) -> None:
    """The commit's are those of the optimizer, which the schedule never had."""
    made: list[LRScheduler] = []

    def schedule(optimizer: Optimizer) -> LRScheduler:
        made.append(restarts(optimizer))
        return made[-1]

    train(f"file://{tmp_path}", lambda optimizer: StepLR(optimizer, 3), 2)
    train(f"file://{tmp_path}", schedule, 3)
    assert made[-1].base_lrs == [0.001]


def in_two_groups(weights: Iterator[nn.Parameter]) -> Optimizer:
    return torch.optim.AdamW([{"params": [each]} for each in weights], 0.013)


@pytest.mark.parametrize(
    ("schedule", "name"),
    [
        pytest.param(restarts, "Restarts", id="base"),
        pytest.param(lambda optimizer: CyclicLR(optimizer, 0.013, 0.1), "CyclicLR", id="highest"),
    ],
)
def test_a_schedule_whose_own_rates_are_for_other_groups_is_refused(
    schedule: Callable[[Optimizer], LRScheduler], name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    train(f"file://{tmp_path}", schedule, 2, make=lambda weights: torch.optim.AdamW(weights, 0.013))
    with pytest.raises(SystemExit, match="1"):
        train(f"file://{tmp_path}", schedule, 4, make=in_two_groups)
    said = f"step 2 has a {name} for 1 parameter groups, and the script forms 2. Set the groups back, or"
    assert said in capsys.readouterr().err
