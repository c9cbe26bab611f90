"""On a resume a model is built without first values, and nothing else differs."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import spottrain
from spottrain.loop.build import build

pytestmark = pytest.mark.usefixtures("world_of_its_own")


class Model(nn.Module):
    """Layers with usual and unusual first values, tied weights, a norm, and tables that are computed."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(8, 4)
        first, head = nn.Linear(4, 4), nn.Linear(4, 8, bias=False)
        nn.init.trunc_normal_(first.weight, std=0.02)
        nn.init.orthogonal_(first.weight)
        head.weight = self.embedding.weight
        self.layers = nn.Sequential(first, nn.LayerNorm(4), head)
        self.scale = nn.Parameter(torch.full((4,), 0.5))
        self.register_buffer("table", torch.linspace(0, 1, 4), persistent=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = self.layers(self.embedding(x) * self.scale + self.table)
        return y


def train(uri: str, last: int, make: Callable[[], nn.Module] = Model, *, builds: bool = True) -> dict[str, Any]:
    """The weights after step `last`, what the script draws after its build, and whether the model was blank."""
    with spottrain.session(
        strategy="ddp", global_batch=4, micro_batch=4, checkpoint_uri=uri, checkpoint_interval="1steps"
    ) as session:
        model = session.build(make) if builds else make()
        blank = bool(model.get_parameter("embedding.weight").isnan().all())
        drawn = torch.rand(2)
        training = session.prepare(
            model,
            optimizer=lambda model: torch.optim.AdamW(model.parameters(), lr=0.01),
            dataset=[torch.tensor(index) for index in range(8)],
        )
        for step in training.steps(total=last):
            for batch in step.micro_batches():
                step.backward(nn.functional.cross_entropy(training.model(batch), batch))
            step.update()
        return {"state": training.full_state_dict(), "drawn": drawn, "blank": blank}


def test_a_resume_without_first_values_is_that_of_a_usual_build(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    usual = train(f"file://{tmp_path}/usual", 4, builds=False)
    first = train(f"file://{tmp_path}/built", 2)
    resumed = [train(f"file://{tmp_path}/built", last) for last in (3, 4)]
    assert [first["blank"], *(each["blank"] for each in resumed)] == [False, True, True]
    assert all(torch.equal(each["drawn"], usual["drawn"]) for each in (first, *resumed))
    assert usual["state"].keys() == resumed[-1]["state"].keys()
    assert all(torch.equal(resumed[-1]["state"][name], value) for name, value in usual["state"].items())
    assert "differ" not in caplog.text


class Drawn(Model):
    """A table of random numbers that no commit holds."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("noise", torch.empty(4).normal_(), persistent=False)


class Attribute(Model):
    def __init__(self) -> None:
        super().__init__()
        self.noise = nn.init.uniform_(torch.empty(4))


class Shuffled(Model):
    """It draws a permutation, too."""

    def __init__(self) -> None:
        super().__init__()
        self.order = torch.randperm(4)


class OfFirstValues(Model):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("norms", self.embedding.weight.detach().norm(dim=1), persistent=False)


class Refusing(Model):
    def __init__(self) -> None:
        super().__init__()
        if self.embedding.weight.isnan().any():
            raise ValueError("no values")


@pytest.mark.parametrize("make", [Drawn, Attribute, Shuffled, OfFirstValues, Refusing])
def test_a_model_that_needs_its_first_values_is_built_as_usual(make: Callable[[], nn.Module]) -> None:
    torch.manual_seed(5)
    usual = make()
    drawn = torch.rand(2)
    torch.manual_seed(5)
    record = build(make, None).record
    torch.manual_seed(5)
    built = build(make, record)
    assert torch.equal(torch.rand(2), drawn)
    assert built.blank == frozenset()
    for name, value in usual.state_dict().items():
        assert torch.equal(built.model.state_dict()[name], value)
    for name in ("noise", "order", "norms"):
        if hasattr(usual, name):
            assert torch.equal(getattr(built.model, name), getattr(usual, name))


def test_after_other_draws_than_before_the_model_is_built_as_usual() -> None:
    torch.manual_seed(5)
    record = build(Model, None).record
    torch.manual_seed(6)
    built = build(Model, record)
    assert not any(each.isnan().any() for each in built.model.parameters())


class Frozen(Model):
    def __init__(self) -> None:
        super().__init__()
        self.layers[0].requires_grad_(False)


def test_weights_that_are_not_trained_are_blank_without_a_warning(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    for last in (2, 3):
        found = train(f"file://{tmp_path}", last, Frozen)
    assert found["blank"]
    assert not any(value.isnan().any() for value in found["state"].values())
    assert "aren't trained differ" not in caplog.text
