"""The small model that both sides of the recovery benchmark train.

It is an MLP on random vectors, 256 a step.
"""

from __future__ import annotations

import os
import time
from pathlib import Path

import torch
from torch import Tensor, nn

GLOBAL_BATCH = 256
WIDTH = 512
NUM_SAMPLES = 1 << 16
# Both sides save at this interval.
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


def log_step(step: int) -> None:
    """Append "seconds step" to the file in STEP_LOG.

    Rank 0 calls it after each optimizer step.
    """
    with Path(os.environ["STEP_LOG"]).open("a") as log:
        log.write(f"{time.time():.3f} {step}\n")
