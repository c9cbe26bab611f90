"""The loop of another framework, on one rank."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch
from torch import nn

import spottrain
from spottrain.loop.foreign_loop import ForeignLoop
from spottrain_api.contract import StabilityAction, StabilityConfig

pytestmark = pytest.mark.usefixtures("world_of_its_own")


def test_an_optimizer_without_state_rolls_back(tmp_path: Path) -> None:
    """torch steps such an optimizer to make its state, whenever that is read."""
    with spottrain.session(
        global_batch=1,
        micro_batch=1,
        checkpoint_uri=f"file://{tmp_path}",
        checkpoint_interval="2steps",
        stability=StabilityConfig(non_finite=StabilityAction.ROLLBACK),
    ) as session:
        model = nn.Linear(1, 1)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        loop = ForeignLoop(session.adopt(model, optimizer, dataset=[torch.ones(1)] * 8), total=6)
        optimizer.register_step_pre_hook(loop.before_update)
        for _, batch in loop.micro_batches():
            torch.autograd.backward(loop.weigh(model(batch).sum() * (math.nan if loop.step == 4 else 1.0)))
            optimizer.step()
            optimizer.zero_grad()
        progress = session._context.reporter.progress
    assert loop.step == 6
    assert progress.rollbacks == 1
