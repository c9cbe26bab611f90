"""What an optimizer has beside its state_dict: numbers in attributes, and optimizers that it keeps."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import Optimizer

from spottrain.checkpoint.errors import UnsupportedState
from spottrain.checkpoint.format.described import as_described
from spottrain.engines.optimizer_state import NamedOptimizer
from spottrain.engines.own_numbers import watch_numbers

Parameters = Iterable[nn.Parameter]


class Lookahead(Optimizer):
    """Shares groups and state with the optimizer that it keeps, and counts steps in an attribute."""

    def __init__(self, parameters: Parameters, every: int = 2) -> None:
        self.base = torch.optim.AdamW(parameters, lr=0.05)
        super().__init__(self.base.param_groups, self.base.defaults)
        self.base.param_groups, self.base.state = self.param_groups, self.state
        self.every, self.steps = every, 0

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        self.base.step()
        self.steps += 1
        for parameter in (each for group in self.param_groups for each in group["params"]):
            slow = self.state[parameter].setdefault("slow", parameter.clone())
            if self.steps % self.every == 0:
                parameter.copy_(slow.lerp_(parameter, 0.5))


class Warmed(torch.optim.SGD):
    """Its rate follows from an attribute that appears in the first step."""

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        self.beta_power = 0.9 * getattr(self, "beta_power", 1.0)
        for group in self.param_groups:
            group["lr"] = 0.1 * (1 - self.beta_power)
        super().step()


class Sharpness(Optimizer):
    """Keeps an optimizer whose momentum its state_dict lacks, as the usual SAM."""

    def __init__(self, parameters: Parameters) -> None:
        super().__init__(parameters, {"rho": 0.05})
        self.base_optimizer = torch.optim.SGD(self.param_groups, lr=0.1, momentum=0.9)
        self.param_groups = self.base_optimizer.param_groups

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        self.base_optimizer.step()


class WholeSharpness(Sharpness):
    """Its state_dict has all."""

    def state_dict(self) -> dict[str, Any]:
        return {**super().state_dict(), "base": self.base_optimizer.state_dict()["state"]}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        values = dict(state_dict)
        base = values.pop("base")
        super().load_state_dict(values)
        self.base_optimizer.load_state_dict({"state": base, "param_groups": values["param_groups"]})
        self.base_optimizer.param_groups = self.param_groups


class Run:
    """A model, its optimizer, and the optimizer's state in a commit."""

    def __init__(self, make: Callable[[Parameters], Optimizer]) -> None:
        torch.manual_seed(0)
        self.model = nn.Linear(3, 2)
        self.optimizer = make(self.model.parameters())
        watch_numbers(self.optimizer)
        self.named = NamedOptimizer(self.optimizer, {each: name for name, each in self.model.named_parameters()})

    def train(self, first: int, last: int) -> None:
        for step in range(first, last):
            self.optimizer.zero_grad()
            x = torch.randn(4, 3, generator=torch.Generator().manual_seed(step))
            self.model(x).square().mean().backward()
            self.optimizer.step()

    def resume(self, other: Run) -> None:
        """Take over weights and state of another run, by way of a commit."""
        self.model.load_state_dict(other.model.state_dict())
        saved = other.named.state()
        room = self.named.room(as_described(saved))
        fill(room, saved)
        self.named.load(room)

    def weights(self) -> list[float]:
        return [value for each in self.model.parameters() for value in each.flatten().tolist()]


def fill(room: Any, saved: Any) -> None:
    for key, value in saved.items():
        if isinstance(value, torch.Tensor):
            room[key].copy_(value)
        elif isinstance(value, dict):
            fill(room[key], value)


@pytest.mark.parametrize("make", [Lookahead, Warmed, WholeSharpness])
def test_it_resumes_as_if_undisturbed(make: Callable[[Parameters], Optimizer]) -> None:
    steady, half = Run(make), Run(make)
    steady.train(0, 7)
    half.train(0, 3)
    resumed = Run(make)
    resumed.resume(half)
    resumed.train(3, 7)
    assert resumed.weights() == steady.weights()
    again = Run(make)  # as at a roll-back, into an optimizer that has gone on
    again.train(0, 4)
    again.resume(half)
    again.train(3, 7)
    assert again.weights() == steady.weights()


def test_settings_of_the_script_are_in_no_commit() -> None:
    run = Run(lambda parameters: Lookahead(parameters, every=5))
    run.train(0, 3)
    assert run.named.state()["numbers"] == {"steps": 3}
    other = Run(Lookahead)
    other.resume(run)
    assert isinstance(other.optimizer, Lookahead)
    assert (other.optimizer.every, other.optimizer.steps) == (2, 3)


def test_an_optimizer_whose_state_no_state_dict_has_is_refused_after_the_first_step() -> None:
    run = Run(Sharpness)
    run.train(0, 1)
    with pytest.raises(
        UnsupportedState,
        match=r"The optimizer Sharpness keeps another one \(base_optimizer, SGD\) whose state is not in its state",
    ):
        run.named.state()
