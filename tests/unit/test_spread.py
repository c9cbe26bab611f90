"""Models that the session spreads for a loop of the script's own: what is refused."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import spottrain
from spottrain.world.failures import UserError

pytestmark = pytest.mark.usefixtures("world_of_its_own")


class Scaled(nn.Module):
    """A layer, and a scale without dimensions."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.scale = nn.Linear(4, 4), nn.Parameter(torch.ones(()))

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        scaled: torch.Tensor = self.layer(inputs) * self.scale
        return scaled


def test_a_parameter_that_cannot_be_sharded_is_refused_by_name_and_fits_ddp() -> None:
    said = r"the parameter scale \(shape \[\], torch.float32\) can't be sharded"
    with spottrain.session(strategy="fsdp") as session, pytest.raises(UserError, match=said):
        session.spread(Scaled())
    with spottrain.session(strategy="ddp") as session:
        assert session.spread(Scaled())(torch.ones(1, 4)).shape == (1, 4)


@pytest.mark.parametrize(
    ("settings", "model", "said"),
    [
        ({"strategy": "deepspeed"}, nn.Linear(1, 1), "session.spread is for ddp and fsdp"),
        ({}, None, "the model is a NoneType"),
    ],
)
def test_what_it_cannot_spread_is_refused(settings: dict[str, Any], model: Any, said: str) -> None:
    with spottrain.session(**settings) as session, pytest.raises(UserError, match=said):
        session.spread(model)
