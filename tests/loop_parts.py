"""What loops as people write them share: data, and how a script of its own spreads a model."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

import spottrain

STEPS_A_WORLD = 2
NUM_WORLDS = 3
TOTAL = STEPS_A_WORLD * NUM_WORLDS
WIDTH, NUM_SAMPLES = 6, 40

Weigh = Callable[[torch.Tensor], torch.Tensor]


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


def spread(session: spottrain.Session, model: nn.Module) -> nn.Module:
    """As a script of its own does it."""
    return nn.parallel.DistributedDataParallel(model) if session.world_size > 1 else model


def plain_state(**models: nn.Module) -> dict[str, torch.Tensor]:
    """The weights of all models."""
    return {
        f"{name}.{key}": value.detach().clone()
        for name, model in models.items()
        for key, value in getattr(model, "module", model).state_dict().items()
    }
