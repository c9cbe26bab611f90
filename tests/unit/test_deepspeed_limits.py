"""Optimizers that ZeRO can't use, by their names."""

from __future__ import annotations

import pytest
import torch
from torch import nn

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
