"""What the strategy for Lightning can't follow is refused with one cause a sentence."""

from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
from torch.optim.lr_scheduler import ReduceLROnPlateau


def refusals(*case: Any, **how: Any) -> Iterator[str]:
    from spottrain.adapters.lightning import _refusals  # takes seconds, in each process that collects tests

    return _refusals(*case, **how)


def schedule(interval: str = "step", frequency: int = 1, *, is_plateau: bool = False) -> SimpleNamespace:
    plateau = object.__new__(ReduceLROnPlateau)  # without an optimizer: the first one imports torch's compiler
    return SimpleNamespace(interval=interval, frequency=frequency, reduce_on_plateau=is_plateau, scheduler=plateau)


def trainer(*schedules: SimpleNamespace, by_itself: bool = True, **settings: Any) -> Any:
    return SimpleNamespace(
        **{"max_steps": 5, "max_epochs": None, "limit_train_batches": 1.0, "overfit_batches": 0} | settings,
        lightning_module=SimpleNamespace(automatic_optimization=by_itself),
        strategy=SimpleNamespace(lr_scheduler_configs=schedules),
    )


EPOCHS: dict[str, Any] = {"max_steps": -1, "max_epochs": 3}


@pytest.mark.parametrize(
    ("accepted", "num_optimizers"),
    [
        (trainer(schedule()), 1),
        (trainer(schedule("epoch"), **EPOCHS), 1),
        (trainer(schedule(), **EPOCHS), 1),
        (trainer(schedule("epoch"), schedule(frequency=2), by_itself=False, **EPOCHS), 2),
    ],
)
def test_what_can_be_followed_has_no_refusal(accepted: Any, num_optimizers: int) -> None:
    assert list(refusals(accepted, num_optimizers)) == []


def test_a_job_that_judges_steps_needs_automatic_optimization() -> None:
    [sentence] = refusals(trainer(by_itself=False, **EPOCHS), 2, is_judged=True)
    assert "needs automatic optimization if the job has stability" in sentence


@pytest.mark.parametrize(
    ("refused", "num_optimizers", "cause"),
    [
        (trainer(max_steps=-1, max_epochs=-1), 1, "pass Trainer(max_epochs=...) or Trainer(max_steps=...)"),
        (trainer(by_itself=False), 2, "needs max_epochs for a module with manual optimization"),
        (trainer(), 2, "one optimizer, and configure_optimizers returns 2"),
        (trainer(limit_train_batches=0.5), 1, "without limit_train_batches"),
        (trainer(overfit_batches=3), 1, "without overfit_batches"),
        (trainer(schedule("epoch")), 1, 'returns "interval": "epoch" and "frequency": 1'),
        (trainer(schedule(frequency=2)), 1, 'returns "interval": "step" and "frequency": 2'),
        (trainer(schedule(is_plateau=True)), 1, "follows no metric"),
    ],
)
def test_each_cause_has_a_sentence_of_its_own(refused: Any, num_optimizers: int, cause: str) -> None:
    [sentence] = refusals(refused, num_optimizers)
    assert cause in sentence
