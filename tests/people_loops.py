"""Loops as people write them, for the library and for a single process without it."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.nn import functional

import spottrain

STEPS_A_WORLD = 2
NUM_WORLDS = 3
TOTAL = STEPS_A_WORLD * NUM_WORLDS
WIDTH, NUM_SAMPLES = 6, 40

Tensors = dict[str, torch.Tensor]


@dataclass(frozen=True)
class Loop:
    """A loop.

    Attributes:
        train: The script. It calls its second argument after each step, which asks for a drain, and returns the
            trained weights on rank 0.
        plain: What a single process trains without the library.
    """

    train: Callable[[spottrain.Session, Callable[[], None]], Mapping[str, Any]]
    plain: Callable[[], Mapping[str, Any]]
    global_batch: int
    micro_batch: int


def samples() -> list[tuple[torch.Tensor, torch.Tensor]]:
    draw = torch.Generator().manual_seed(3)
    return [(torch.randn(WIDTH, generator=draw), torch.randn(WIDTH, generator=draw)) for _ in range(NUM_SAMPLES)]


def batches(size: int) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """The global batches of the steps, in the order of the data."""
    data = samples()
    for step in range(TOTAL):
        chosen = [data[position % NUM_SAMPLES] for position in range(step * size, (step + 1) * size)]
        images, texts = zip(*chosen, strict=True)
        yield torch.stack(images), torch.stack(texts)


class Towers(nn.Module):
    """Two encoders and the scale of their products, as CLIP has them."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(11)
        self.image, self.text = nn.Linear(WIDTH, 4), nn.Linear(WIDTH, 4)
        self.scale = nn.Parameter(torch.tensor(0.7))

    def forward(self, images: torch.Tensor, texts: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        one, other = (functional.normalize(each, dim=-1) for each in (self.image(images), self.text(texts)))
        return one, other, self.scale.exp().reshape(1)


def contrastive(images: torch.Tensor, texts: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    """Each image's text among all texts of the batch, and the other way round (Radford et al., 2021)."""
    logits = scale * images @ texts.T
    labels = torch.arange(len(logits))
    return (functional.cross_entropy(logits, labels) + functional.cross_entropy(logits.T, labels)) / 2


def adam(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=0.02)


def contrastive_loop(global_batch: int) -> Loop:
    def train(session: spottrain.Session, after_step: Callable[[], None]) -> Mapping[str, Any]:
        training = session.prepare(Towers(), optimizer=adam, dataset=samples(), shuffle=False)
        for step in training.steps(total=TOTAL):
            for images, texts in step.micro_batches():
                one, other, scale = training.model(images, texts)
                step.backward(contrastive(step.gather(one), step.gather(other), scale))
            loss = training.step_loss()
            step.update()
            assert math.isfinite(loss)
            after_step()
        return training.full_state_dict()

    def plain() -> Mapping[str, Any]:
        model = Towers()
        optimizer = adam(model)
        for images, texts in batches(global_batch):
            optimizer.zero_grad()
            torch.autograd.backward(contrastive(*model(images, texts)))
            optimizer.step()
        return model.state_dict()

    return Loop(train, plain, global_batch, micro_batch=global_batch)


LOOPS = {"contrastive": contrastive_loop(7), "contrastive with idle ranks": contrastive_loop(2)}
