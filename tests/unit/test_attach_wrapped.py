"""Models, optimizers and schedules as Accelerate and Fabric return them are attached like torch's own.

The tests import Accelerate and Fabric themselves: that takes seconds.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim.lr_scheduler import ExponentialLR

import spottrain
from spottrain.world.failures import UserError

pytestmark = pytest.mark.usefixtures("world_of_its_own")

Wrap = Callable[[nn.Module, torch.optim.Optimizer], Any]


def by_accelerate(model: nn.Module, optimizer: torch.optim.Optimizer) -> Any:
    from accelerate import Accelerator

    return Accelerator(cpu=True).prepare(model, optimizer)


def by_fabric(model: nn.Module, optimizer: torch.optim.Optimizer) -> Any:
    from lightning.fabric import Fabric

    return Fabric(accelerator="cpu", devices=1).setup(model, optimizer)


def train(folder: Path, total: int, wrap: Wrap) -> dict[str, Any]:
    torch.manual_seed(3)
    model = nn.Linear(3, 1)
    with spottrain.session(global_batch=2, checkpoint_uri=f"file://{folder}") as session:
        wrapped, optimizer = wrap(model, torch.optim.Adam(model.parameters(), lr=0.1))
        schedule = ExponentialLR(optimizer, 0.5)
        run = session.attach(total=total, model=wrapped, optimizer=optimizer, schedule=schedule)
        while run.step < run.total:
            loss = wrapped(torch.full((2, 3), 1.0 + run.step)).square().mean()
            optimizer.zero_grad()
            torch.autograd.backward(loss)
            optimizer.step()
            schedule.step()
            run.boundary(loss)
    return {**model.state_dict(), "lr": torch.tensor(optimizer.param_groups[0]["lr"])}


@pytest.mark.parametrize("wrap", [by_accelerate, by_fabric])
def test_they_resume_and_continue_without_the_framework(wrap: Wrap, tmp_path: Path) -> None:
    whole = train(tmp_path / "whole", 4, wrap)
    train(tmp_path / "cut", 2, wrap)
    train(tmp_path / "cut", 3, wrap)
    resumed = train(tmp_path / "cut", 4, lambda *plain: plain)
    for name, value in whole.items():
        torch.testing.assert_close(resumed[name], value, rtol=0, atol=0)


def test_a_schedule_that_steps_once_for_each_rank_is_refused() -> None:
    from accelerate import Accelerator

    model = nn.Linear(3, 1)
    optimizer = torch.optim.Adam(model.parameters())
    with spottrain.session() as session:
        of_ranks = Accelerator(cpu=True).prepare(ExponentialLR(optimizer, 0.5))
        with pytest.raises(UserError, match="schedule steps once for each rank"):
            session.attach(total=1, model=model, optimizer=optimizer, schedule=of_ranks)
