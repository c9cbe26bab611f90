"""One optimizer step, as scripts see it, without an engine."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from spottrain.data.batch import BatchPlan, FetchedBatch
from spottrain.engines.engine import MakeOptimizer
from spottrain.loop.step import LossMeter, Step


class _NoEngine:
    def wrap(self, model: nn.Module, optimizer: MakeOptimizer) -> tuple[nn.Module, torch.optim.Optimizer]:
        return model, optimizer(model)

    def begin_micro_batch(self, *, is_last: bool) -> None:
        """Nothing to begin."""

    def backward(self, loss: torch.Tensor) -> None:
        torch.autograd.backward(loss)

    def update(self) -> None:
        """Nothing to optimise."""

    def gradients_are_finite(self) -> bool:
        return True

    def update_average(self, average: nn.Module, source: nn.Module, decay: float) -> None:
        """Nothing to average."""

    def discard(self) -> None:
        """Nothing to clear."""

    def state(self) -> dict[str, Any]:
        return {}

    def room(self, saved: dict[str, Any]) -> dict[str, Any]:
        return {}

    def try_load(self) -> None:
        """Nothing to load."""

    def model_state(self) -> dict[str, Any]:
        return {}

    def frozen(self) -> set[str]:
        return set()

    def state_in_use(self) -> dict[str, Any]:
        return {}

    def frozen_in_use(self) -> set[str]:
        return set()

    def beside(self) -> list[torch.Tensor]:
        return []

    def changing(self) -> dict[str, Any]:
        return {}

    def load_state(self, state: dict[str, Any]) -> None:
        """Nothing to load."""


def make_step(updates: list[int]) -> Step:
    plan = BatchPlan(global_batch=3, micro_batch=2, world_size=1)
    return Step(
        1,
        rank=0,
        plan=plan,
        batches=map(FetchedBatch, plan.micro_batches(0, range(3)), [1.0, 2.0]),
        engine=_NoEngine(),
        meter=LossMeter(),
        begin=lambda index: None,
        update=lambda: updates.append(1),
    )


def test_a_step_accumulates_the_mean_over_its_samples() -> None:
    weight = torch.ones(1, requires_grad=True)
    step = make_step([])
    for batch in step.micro_batches():
        step.backward(weight.sum() * batch)
    assert weight.grad is not None
    assert weight.grad.item() == pytest.approx((1 * 1.0 + 2 * 2.0) / 3)


def test_a_loop_that_leaves_something_out_is_refused() -> None:
    updates: list[int] = []
    loss = torch.ones(1, requires_grad=True).sum()
    with pytest.raises(RuntimeError, match="belongs inside"):
        make_step(updates).backward(loss)
    with pytest.raises(RuntimeError, match=r"step.backward\(loss\) was not called"):
        list(make_step(updates).micro_batches())
    step = make_step(updates)
    next(step.micro_batches())
    step.backward(loss)
    with pytest.raises(RuntimeError, match="after 1 of 2 micro-batches"):
        step.update()
    with pytest.raises(RuntimeError, match=r"step.micro_batches\(\) was used twice"):
        next(step.micro_batches())
    assert not updates
