"""The modules of a model that are gathered as one.

The models have architectures as people write them.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from spottrain.engines.blocks import find_blocks


class Block(nn.Module):
    """Attention, and a feed-forward part that is a list itself."""

    def __init__(self, width: int = 16) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(width, 2)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        attended: torch.Tensor = self.attention(x, x, x)[0]
        fed: torch.Tensor = self.mlp(attended)
        return fed


class Model(nn.Module):
    """Modules by the names that are given."""

    def __init__(self, **children: nn.Module) -> None:
        super().__init__()
        for name, child in children.items():
            self.add_module(name, child)

    def forward(self, x: Any) -> Any:
        for child in self.children():
            x = child(x)
        return x


def tied_gpt() -> nn.Module:
    model = Model(tokens=nn.Embedding(100, 16), blocks=blocks(3), head=nn.Linear(16, 100, bias=False))
    model.get_submodule("head").weight = model.get_submodule("tokens").weight
    return model


def blocks(number: int, cls: type[nn.Module] = Block) -> nn.ModuleList:
    return nn.ModuleList(cls() for _ in range(number))


class Experts(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.experts = blocks(4)

    def forward(self, x: Any) -> Any:
        return self.experts[0](x)


def resnet() -> nn.Module:
    def stage(num: int, width: int) -> nn.Module:
        basic = [Model(conv1=nn.Conv2d(width, width, 3), norm=nn.BatchNorm2d(width)) for _ in range(num)]
        return nn.Sequential(*basic)

    stem = nn.Sequential(nn.Conv2d(3, 8, 7), nn.ReLU(), nn.MaxPool2d(2))
    return Model(stem=stem, layer1=stage(2, 8), layer2=stage(2, 16), fc=nn.Linear(16, 10))


def unet() -> nn.Module:
    def level(*layers: nn.Module) -> nn.ModuleList:
        return nn.ModuleList(layers)

    downs = nn.ModuleList(level(Block(), Block(), nn.Linear(16, 16)) for _ in range(2))
    return Model(downs=downs, out=nn.Linear(16, 1))


def levels() -> nn.Module:
    """Lists in a list, none of which repeats anything itself."""
    pairs = nn.ModuleList(nn.ModuleList([Block(), nn.Linear(16, 16)]) for _ in range(2))
    return Model(levels=pairs, out=nn.Linear(16, 1))


def swin() -> nn.Module:
    """Stages in a list, each with a list of blocks."""
    stages = nn.ModuleList(Model(blocks=blocks(number), down=nn.Linear(16, 16)) for number in (2, 3))
    return Model(stages=stages, head=nn.Linear(16, 10))


def albert() -> nn.Module:
    """One block, used three times."""
    shared = Block()
    return Model(tokens=nn.Embedding(100, 16), layers=nn.ModuleList([shared, shared, shared]))


def blocks_that_share_a_weight() -> nn.Module:
    model = Model(layers=blocks(3), out=nn.Linear(16, 4))
    model.get_submodule("layers.2.mlp.0").weight = model.get_submodule("layers.1.mlp.0").weight
    return model


def blocks_that_share_a_module() -> nn.Module:
    model = Model(layers=blocks(3), out=nn.Linear(16, 4))
    model.set_submodule("layers.2.mlp.0", model.get_submodule("layers.1.mlp.0"))
    return model


@pytest.mark.parametrize(
    ("model", "wanted"),
    [
        pytest.param(tied_gpt(), ["blocks.0", "blocks.1", "blocks.2"], id="gpt with tied weights"),
        pytest.param(
            nn.Transformer(16, 2, 1, 2, 32),
            ["decoder.layers.0", "decoder.layers.1"],
            id="decoder of two layers, encoder of one",
        ),
        pytest.param(
            nn.Transformer(16, 2, 2, 2, 32),
            ["encoder.layers.0", "encoder.layers.1", "decoder.layers.0", "decoder.layers.1"],
            id="encoder and decoder",
        ),
        pytest.param(resnet(), ["layer1.0", "layer1.1", "layer2.0", "layer2.1"], id="cnn of stages"),
        pytest.param(
            unet(), [f"downs.{level}.{item}" for level in range(2) for item in range(3)], id="lists in lists"
        ),
        pytest.param(levels(), ["levels.0.0", "levels.0.1", "levels.1.0", "levels.1.1"], id="pairs in a list"),
        pytest.param(
            swin(),
            ["stages.0.blocks.0", "stages.0.blocks.1", *(f"stages.1.blocks.{index}" for index in range(3))],
            id="stages with blocks",
        ),
        pytest.param(albert(), ["layers.0"], id="one block used three times"),
        pytest.param(blocks_that_share_a_weight(), ["layers.0"], id="blocks that share a weight"),
        pytest.param(blocks_that_share_a_module(), ["layers.0"], id="blocks that share a module"),
        pytest.param(
            Model(layers=nn.ModuleList(Experts() for _ in range(2))), ["layers.0", "layers.1"], id="experts in blocks"
        ),
        pytest.param(Model(moe=Experts(), out=nn.Linear(16, 4)), ["out"], id="experts without blocks"),
        pytest.param(
            nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 1)), ["0", "2"], id="layers in a sequence"
        ),
        pytest.param(
            Model(tokens=nn.Embedding(9, 8), rnn=nn.LSTM(8, 16, 2), out=nn.Linear(16, 9)),
            ["rnn", "out"],
            id="no list: parts by size",
        ),
        pytest.param(Model(a=Block(), b=nn.Linear(16, 2)), ["a.mlp.0", "a.mlp.2"], id="one block alone"),
        pytest.param(nn.Linear(3, 3), [], id="a layer"),
    ],
)
def test_blocks_are_found(model: nn.Module, wanted: list[str]) -> None:
    names = {module: name for name, module in reversed(list(model.named_modules(remove_duplicate=False)))}
    found = [names[module] for module in find_blocks(model)]
    assert found == wanted


def test_what_the_script_names_is_taken_inner_ones_last() -> None:
    model = swin()
    found = find_blocks(model, {Block, nn.MultiheadAttention})
    assert len(found) == 10
    assert isinstance(found[0], Block)
    assert find_blocks(model, set()) == []
    with pytest.raises(ValueError, match=r"no module of the classes to wrap \(Conv1d\); name other classes, or none"):
        find_blocks(model, {nn.Conv1d})
