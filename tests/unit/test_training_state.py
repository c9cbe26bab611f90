"""The parts of a run's state besides tensors, after a resume."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer
from torch.optim.lr_scheduler import CosineAnnealingLR, LinearLR, LRScheduler, SequentialLR

import spottrain
from spottrain.schedules import warmup_cosine

STEPS = 6


@pytest.fixture(autouse=True)
def _world_of_its_own() -> Iterator[None]:
    yield
    if dist.is_initialized():
        dist.destroy_process_group()


def train(
    uri: str, schedule: Callable[[Optimizer], LRScheduler] | None, last: int, strategy: str = "ddp"
) -> torch.Tensor:
    """The weights after step `last` of a run whose learning rate is a tensor."""
    with spottrain.session(strategy=strategy, global_batch=4, micro_batch=4, checkpoint_uri=uri) as session:
        training = session.prepare(
            nn.Linear(4, 1),
            optimizer=lambda model: torch.optim.AdamW(model.parameters(), lr=torch.tensor(0.013)),
            scheduler=schedule,
            dataset=[torch.arange(4.0) + index for index in range(8)],
        )
        for step in training.steps(total=last):
            for batch in step.micro_batches():
                step.backward(training.model(batch).square().mean())
            step.update()
        weights = [parameter.detach() for parameter in training.model.parameters()]
        return torch.cat([(w.full_tensor() if isinstance(w, DTensor) else w).flatten() for w in weights])


@pytest.mark.parametrize(
    "schedule",
    [
        lambda optimizer: CosineAnnealingLR(optimizer, 17),
        lambda optimizer: SequentialLR(
            optimizer, [LinearLR(optimizer, 0.3, total_iters=3), CosineAnnealingLR(optimizer, 17)], [2]
        ),
    ],
    ids=["cosine", "sequence"],
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


def test_what_has_changed_since_the_commit_is_one_message(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """The status shows the newest message alone."""
    train(f"file://{tmp_path}", warmup_cosine(total=STEPS), STEPS)
    train(f"file://{tmp_path}", warmup_cosine(total=STEPS + 2), STEPS + 2, strategy="fsdp")
    warnings = [record.getMessage() for record in caplog.records if record.levelno == logging.WARNING]
    [message] = [warning for warning in warnings if "The checkpoint at step" in warning]
    assert "with the strategy ddp" in message
    assert f"of a run of {STEPS} steps" in message
