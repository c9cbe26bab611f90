"""Orders of samples as scripts bring them: functions of the epoch. The data set has 46 samples."""

from __future__ import annotations

import os

import torch

NUM_SAMPLES = 46


def weighted(epoch: int) -> torch.Tensor:
    """As a weighted sampler without a generator of its own: with replacement, more of them in later epochs."""
    return torch.multinomial(torch.arange(1.0, NUM_SAMPLES + 1), 33 + 3 * epoch, replacement=True)


def packed(epoch: int) -> list[list[int]]:
    """As a batch sampler that packs samples to a length: batches of 1 to 10 samples, another number in each epoch."""
    batches: list[list[int]] = [[]]
    for index in torch.randperm(NUM_SAMPLES, generator=torch.Generator().manual_seed(epoch)).tolist():
        if sum(map(_length, batches[-1])) + _length(index) > 20 or len(batches[-1]) == 10:
            batches.append([])
        batches[-1].append(index)
    return batches


def by_rank(epoch: int) -> list[int]:
    """Of the second epoch, every rank draws its own."""
    rank = int(os.environ["RANK"]) if epoch == 1 else 0
    return [(index + rank) % NUM_SAMPLES for index in range(NUM_SAMPLES)]


def _length(index: int) -> int:
    return 1 + index % 7 * 3
