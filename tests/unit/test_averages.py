"""What `Training.update_average` refuses before anything has changed.

tests/integration/test_awkward_models.py compares averages with a plain loop, under every strategy, and
test_script_habits.py has those that a script computes itself.
"""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

import spottrain
from spottrain.engines.averages import pairs
from spottrain.world.failures import UserError

pytestmark = pytest.mark.usefixtures("world_of_its_own")


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.student = nn.Sequential(nn.Linear(2, 3), nn.Linear(3, 2))
        self.teacher = copy.deepcopy(self.student).requires_grad_(False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = self.student(x)
        return y


def test_parts_that_can_not_follow_are_refused() -> None:
    model = Model()
    assert len(pairs([model], model.teacher, model.student)) == 4
    with pytest.raises(UserError, match=r"0\.weight of the average is trained"):
        pairs([model], model.student, model.teacher)
    with pytest.raises(UserError, match="have to be parts of the model"):
        pairs([model], copy.deepcopy(model.teacher), model.student)
    with pytest.raises(UserError, match=r"0\.weight differs; make it by"):
        pairs([model], model.teacher[1], model.student)
    with pytest.raises(UserError, match="weight differs; make it by"):
        pairs([model], model.teacher[0], model.student[1])


def test_a_decay_that_is_no_share_is_refused() -> None:
    model = Model()
    with spottrain.session(strategy="ddp", global_batch=2, micro_batch=2) as session:
        training = session.prepare(
            model, optimizer=lambda model: torch.optim.SGD(model.parameters(), lr=0.1), dataset=[torch.ones(2)]
        )
        with pytest.raises(UserError, match=r"the decay of an average is from 0 to 1, such as 0\.999, and not 1\.5"):
            training.update_average(model.teacher, model.student, decay=1.5)
