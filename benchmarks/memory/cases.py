"""The trainings to measure: models of several proportions, under each strategy."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import nn
from torch.nn import functional


@dataclass(frozen=True, slots=True, kw_only=True)
class Shape:
    """A GPT, with `micro_batch` sequences of `context` tokens at once."""

    layers: int
    width: int
    context: int
    micro_batch: int
    vocabulary: int

    @property
    def name(self) -> str:
        return f"{self.layers} x {self.width}, {self.micro_batch} x {self.context} of {self.vocabulary}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """`strategy` is ddp, fsdp or the number of a ZeRO stage."""

    shape: Shape
    strategy: str
    precision: str = "fp32"
    checkpointed: bool = False


class Block(nn.Module):
    """As the example's block, with fused attention.

    Input and output: (batch, context, width).
    """

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.project = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        query, key, value = self.qkv(self.norm1(x)).unflatten(-1, (3, -1, 64)).permute(2, 0, 3, 1, 4)
        attended = functional.scaled_dot_product_attention(query, key, value, is_causal=True)
        x = x + self.project(attended.transpose(1, 2).flatten(2))
        return x + self.mlp(self.norm2(x))


class Gpt(nn.Module):
    """From tokens (batch, context) to logits (batch, context, vocabulary)."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.tokens = nn.Embedding(shape.vocabulary, shape.width)
        self.blocks = nn.ModuleList(Block(shape.width) for _ in range(shape.layers))
        self.head = nn.Linear(shape.width, shape.vocabulary, bias=False)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.tokens(ids)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


DEEP = Shape(layers=12, width=256, context=256, micro_batch=2, vocabulary=2_000)
WIDE = Shape(layers=2, width=1024, context=64, micro_batch=1, vocabulary=2_000)
WORDS = Shape(layers=4, width=256, context=128, micro_batch=2, vocabulary=50_257)
LONG = Shape(layers=6, width=256, context=512, micro_batch=4, vocabulary=256)
STRATEGIES = ("ddp", "fsdp", "1", "2", "3")

CASES = (
    *(Case(shape=shape, strategy=strategy) for shape in (DEEP, WIDE, WORDS, LONG) for strategy in STRATEGIES[:2]),
    *(Case(shape=DEEP, strategy=strategy, precision="bf16") for strategy in STRATEGIES),
    *(Case(shape=WIDE, strategy=strategy, precision="bf16") for strategy in STRATEGIES[2:]),
    *(Case(shape=LONG, strategy=strategy, precision="bf16") for strategy in ("fsdp", "2")),
    *(Case(shape=LONG, strategy=strategy, checkpointed=True) for strategy in ("ddp", "fsdp")),
)
