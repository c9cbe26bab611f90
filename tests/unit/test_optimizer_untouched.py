"""Commits and resumes leave an optimizer alone: it makes the steps of the run, and no other.

A step may count, decay weights, or be refused, whatever the gradients are.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

import spottrain
from commits import newest_commit
from one_rank_runs import STEPS, train
from spottrain import StabilityAction, StabilityConfig

pytestmark = pytest.mark.usefixtures("world_of_its_own")


class Halving(Optimizer):
    """It has no state for a parameter, counts in its group, and decays without a rate."""

    def __init__(self, weights: Iterator[nn.Parameter]) -> None:
        super().__init__(weights, {"lr": 0.0, "calls": 0})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            group["calls"] += 1
            for weight in group["params"]:
                weight.mul_(0.5)


class WithoutClosure(torch.optim.SGD):
    def step(self) -> None:  # type: ignore[override]
        super().step()


class InTrainMode(torch.optim.Adam):
    """As optimizers without a schedule, whose weights are averages for an evaluation."""

    is_training = False

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        if not self.is_training:
            raise RuntimeError("the optimizer is not in train mode")
        super().step()


class CountingLate(torch.optim.SGD):
    """Its group has a counter from the first step on, and its momentum begins with the third."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            group["number"] = group.get("number", 0) + 1
            for weight in group["params"]:
                if group["number"] > 2:
                    momentum = self.state[weight].setdefault("late", torch.zeros_like(weight))
                    momentum.mul_(0.5).add_(weight.grad)
                weight.sub_(self.state.get(weight, {}).get("late", weight.grad), alpha=0.01 / group["number"])


def run(
    uri: str | None, last: int, make: Callable[[Iterator[nn.Parameter]], Optimizer], strategy: str, *, bad: int = 0
) -> tuple[torch.Tensor, Optimizer]:
    """A run whose first samples are no numbers, as many as `bad`, so that their steps are skipped."""
    samples = [torch.full((3,), float("nan") if index < bad else 1.0 + index % 3) for index in range(8)]
    skip = StabilityConfig(non_finite=StabilityAction.SKIP)
    with spottrain.session(
        strategy=strategy,
        global_batch=1,
        micro_batch=1,
        checkpoint_uri=uri,
        checkpoint_interval="1steps",
        stability=skip,
    ) as session:
        torch.manual_seed(0)
        training = session.prepare(
            nn.Linear(3, 2), optimizer=lambda model: make(model.parameters()), dataset=samples, shuffle=False
        )
        if hasattr(training.optimizer, "is_training"):
            training.optimizer.is_training = True
        for step in training.steps(total=last):
            for batch in step.micro_batches():
                step.backward(training.model(batch).square().mean())
            step.update()
        return flat(training.model), training.optimizer


def alone(steps: list[int], make: Callable[[Iterator[nn.Parameter]], Optimizer]) -> torch.Tensor:
    """The same run in plain torch."""
    torch.manual_seed(0)
    model = nn.Linear(3, 2)
    optimizer = make(model.parameters())
    if hasattr(optimizer, "is_training"):
        optimizer.is_training = True
    for index in steps:
        optimizer.zero_grad()
        model(torch.full((1, 3), 1.0 + index % 3)).square().mean().backward()
        optimizer.step()
    return flat(model)


def flat(model: nn.Module) -> torch.Tensor:
    weights = [each.full_tensor() if isinstance(each, DTensor) else each for each in model.parameters()]
    return torch.cat([weight.detach().flatten() for weight in weights])


OPTIMIZERS: dict[str, Callable[[Iterator[nn.Parameter]], Optimizer]] = {
    "decays by itself": Halving,
    "no closure": lambda weights: WithoutClosure(weights, lr=0.1, momentum=0.9),
    "train mode": lambda weights: InTrainMode(weights, lr=0.1, weight_decay=0.1),
    "late state": lambda weights: CountingLate(weights, lr=0.1),
    "Adam": lambda weights: torch.optim.Adam(weights, lr=0.01, weight_decay=0.1),
    "NAdam": lambda weights: torch.optim.NAdam(weights, lr=0.01, weight_decay=0.1),
    "ASGD": lambda weights: torch.optim.ASGD(weights, lr=0.01, weight_decay=0.1),
    "Rprop": lambda weights: torch.optim.Rprop(weights, lr=0.01),
    "dampened": lambda weights: torch.optim.SGD(weights, lr=0.01, momentum=0.9, dampening=0.5, weight_decay=0.1),
}


@pytest.mark.parametrize("strategy", ["ddp", "fsdp"])
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_an_optimizer_makes_the_steps_of_the_run_alone(name: str, strategy: str, tmp_path: Path) -> None:
    """Also if the first step is skipped, at a commit each step, and at a resume before and after the first update."""
    make, uri = OPTIMIZERS[name], f"file://{tmp_path}"
    for last in (1, 2, 4):
        run(uri, last, make, strategy, bad=1)
    found, optimizer = run(uri, STEPS, make, strategy, bad=1)
    wanted = alone(list(range(1, STEPS)), make)
    assert torch.equal(found, wanted)
    counts = {group.get("calls", group.get("number", STEPS - 1)) for group in optimizer.param_groups}
    assert counts == {STEPS - 1}


def optimizer_in_commit(folder: Path, strategy: str, *, with_names: bool) -> Any:
    """What a commit holds of the optimizer beside tensors."""
    folder = folder / f"{strategy}-{with_names}"
    with spottrain.session(
        strategy=strategy, global_batch=4, micro_batch=4, checkpoint_uri=f"file://{folder}"
    ) as session:
        training = session.prepare(
            nn.Sequential(*(nn.Linear(2, 2) for _ in range(5))),
            optimizer=lambda model: torch.optim.AdamW(model.named_parameters() if with_names else model.parameters()),
            dataset=list(torch.randn(4, 2)),
        )
        for step in training.steps(total=1):
            for batch in step.micro_batches():
                step.backward(training.model(batch).square().mean())
            step.update()
    return newest_commit(folder)[2]["optimizer"]


def test_names_in_the_groups_of_an_optimizer_do_not_add_to_a_commit(tmp_path: Path) -> None:
    """They follow from the model, and each group would have all of its own for each of its parameters."""
    for strategy in ("ddp", "fsdp"):
        found = optimizer_in_commit(tmp_path, strategy, with_names=True)
        assert found == optimizer_in_commit(tmp_path, strategy, with_names=False)
        assert [group["params"] for group in found["groups"]] == [
            [f"{layer}.{kind}" for layer in range(5) for kind in ("weight", "bias")]
        ]


@pytest.mark.parametrize("strategy", ["ddp", "fsdp"])
def test_a_run_with_names_in_the_groups_of_its_optimizer_resumes_under_another_strategy(
    strategy: str, tmp_path: Path
) -> None:
    def run_with_names(uri: str, last: int, strategy: str) -> torch.Tensor:
        return train(
            uri, None, last, strategy, make=lambda weights: torch.optim.AdamW(zip("wb", weights, strict=True))
        )

    other = "fsdp" if strategy == "ddp" else "ddp"
    whole = run_with_names(f"file://{tmp_path}/whole", STEPS, strategy)
    run_with_names(f"file://{tmp_path}/parts", 2, strategy)
    assert torch.equal(run_with_names(f"file://{tmp_path}/parts", STEPS, other), whole)
