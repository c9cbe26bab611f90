"""Optimizers that ZeRO can't use."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import Adagrad

from spottrain.engines.deepspeed_limits import unfit_optimizer


@pytest.mark.parametrize(
    ("name", "stage", "is_refused"), [("Prodigy", 1, True), ("Prodigy", 0, False), ("Lion", 2, False)]
)
def test_an_optimizer_whose_rate_depends_on_all_tensors_is_refused(name: str, stage: int, is_refused: bool) -> None:
    optimizer = type(name, (torch.optim.SGD,), {})(nn.Linear(2, 2).parameters(), lr=1.0)
    assert (unfit_optimizer(optimizer, stage) is not None) == is_refused


@pytest.mark.parametrize(("name", "is_advised"), [("Muon", True), ("SOAP", False)])
def test_ddp_is_advised_only_for_optimizers_whose_state_it_can_save(name: str, is_advised: bool) -> None:
    optimizer = type(name, (torch.optim.SGD,), {})(nn.Linear(2, 2).parameters(), lr=1.0)
    refusal = unfit_optimizer(optimizer, 1)
    assert refusal is not None
    assert refusal.endswith("such as AdamW, or deepspeed.zeroStage 0, or the strategy ddp.") == is_advised


@pytest.mark.parametrize("stage", [0, 1, 3])
@pytest.mark.parametrize(
    "groups",
    [[{"params": ["weight"]}, {"params": ["bias"], "lr": 0.5}], [{"params": ["weight", "bias"], "lr": 0.5}]],
    ids=["two", "other rate"],
)
def test_adagrad_is_refused_if_zero_would_drop_the_options_of_its_groups(
    groups: list[dict[str, Any]], stage: int
) -> None:
    model = nn.Linear(2, 2)
    named = [{**group, "params": [model.get_parameter(name) for name in group["params"]]} for group in groups]
    assert (unfit_optimizer(Adagrad(named, lr=0.01), stage) is not None) == (stage > 0)


@pytest.mark.parametrize("lr", [0.5, torch.tensor(0.5)])
def test_adagrad_with_options_of_its_constructor_alone_trains_under_zero(lr: float | torch.Tensor) -> None:
    assert unfit_optimizer(Adagrad(nn.Linear(2, 2).parameters(), lr=lr, eps=0.1), 1) is None


class ByNorm(torch.optim.SGD):
    """As people write one: each tensor's gradient has a norm of 1."""

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for parameter in group["params"]:
                parameter.data -= group["lr"] * parameter.grad / parameter.grad.norm()


class OwnMuon(torch.optim.Muon):
    """A subclass that another name hides."""


class Wrapping(torch.optim.Optimizer):
    """It steps another optimizer, which a trial would step, too."""

    def __init__(self, inner: torch.optim.Optimizer) -> None:
        self.inner = inner
        super().__init__(inner.param_groups, {})

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        raise AssertionError("a trial has stepped it")


def test_an_optimizer_of_any_name_that_computes_with_whole_tensors_is_refused() -> None:
    weights = [nn.Parameter(torch.ones(3, 3))]
    for optimizer in (ByNorm(weights, lr=0.0), OwnMuon(weights), type("Mine", (torch.optim.Adafactor,), {})(weights)):
        refusal = unfit_optimizer(optimizer, 1)
        assert refusal is not None
        assert refusal.startswith(f"The optimizer {type(optimizer).__name__} computes with each tensor as a whole")
        assert not optimizer.state
        assert torch.equal(weights[0], torch.ones(3, 3))


@pytest.mark.parametrize(
    "make",
    [
        lambda p: torch.optim.AdamW(p, lr=torch.tensor(0.0), fused=True),
        lambda p: torch.optim.AdamW([{"params": p, "lr": 0.0}], amsgrad=True, foreach=True),
        lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, nesterov=True),
        torch.optim.RMSprop,
        torch.optim.NAdam,
        torch.optim.ASGD,
        torch.optim.Rprop,
        lambda p: Wrapping(torch.optim.SGD(p, lr=0.1)),
    ],
)
def test_an_optimizer_that_treats_each_element_alone_is_accepted(make: Any) -> None:
    weights = [nn.Parameter(torch.ones(3, 3))]
    optimizer = make(weights)
    optimizer.register_step_pre_hook(lambda *_: pytest.fail("a trial is no step of the script"))
    assert unfit_optimizer(optimizer, 1) is None
    assert not optimizer.state
    assert torch.equal(weights[0], torch.ones(3, 3))
