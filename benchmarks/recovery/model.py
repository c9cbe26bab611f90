"""The small model that all sides of the recovery benchmark train.

It is an MLP on random vectors, 256 a step.
"""

from __future__ import annotations

import os
import time
from pathlib import Path

import torch
from torch import Tensor, nn

NUM_NODES, MIN_NODES = 4, 2
GLOBAL_BATCH = 256
WIDTH = 512
NUM_SAMPLES = 1 << 16
# All sides save at this interval.
CHECKPOINT_STEPS = 50


class Vectors(torch.utils.data.Dataset[tuple[Tensor, Tensor]]):
    """Sample `i` is a function of `i` alone."""

    def __len__(self) -> int:
        return NUM_SAMPLES

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        generator = torch.Generator().manual_seed(index)
        vector = torch.randn(WIDTH, generator=generator)
        return vector, vector.roll(1)


def build_model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(WIDTH, 2 * WIDTH), nn.GELU(), nn.Linear(2 * WIDTH, WIDTH))


def batch_of(step: int, share: int, num_shares: int) -> tuple[Tensor, Tensor]:
    """One of `num_shares` shares of a step's samples: inputs and targets."""
    samples = Vectors()
    first = step * GLOBAL_BATCH + share * GLOBAL_BATCH // num_shares
    last = step * GLOBAL_BATCH + (share + 1) * GLOBAL_BATCH // num_shares
    inputs, targets = zip(*(samples[position % NUM_SAMPLES] for position in range(first, last)), strict=True)
    return torch.stack(inputs), torch.stack(targets)


def write_checkpoint(path: Path, state: dict[str, object]) -> None:
    """Write `state` in full, or leave what is there."""
    torch.save(state, path.with_suffix(".tmp"))
    path.with_suffix(".tmp").replace(path)


def log_step(step: int, world_size: int) -> None:
    """Append "seconds step members" to the file in STEP_LOG.

    Rank 0 calls it after each optimizer step.
    """
    with Path(os.environ["STEP_LOG"]).open("a") as log:
        log.write(f"{time.time():.3f} {step} {world_size}\n")
