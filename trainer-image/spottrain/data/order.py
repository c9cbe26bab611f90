"""The order of samples: a pure function of seed, epoch and position. It is the same at any world size.

A run reads positions 0, 1, 2, ... without end. Position p belongs to epoch p // N of a dataset of N samples, and each
epoch is a different permutation of the dataset. The permutation is computed, not stored: a Feistel network on the
smallest even number of bits that holds N, with cycle walking (Black and Rogaway, "Ciphers with Arbitrary Finite
Domains", 2002). So every rank finds any position of any epoch in constant time and memory, and nothing has to be
saved to resume.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

Indices = npt.NDArray[np.int64]
_Words = npt.NDArray[np.uint64]

_NUM_ROUNDS = 8
_MASK = (1 << 64) - 1


@dataclass(frozen=True, slots=True, kw_only=True)
class DataOrder:
    """Which sample is at which position.

    Attributes:
        num_samples: Samples of the data set.
        seed: Seed of the permutations.
        shuffle: False: samples 0, 1, 2, ... in every epoch.
    """

    num_samples: int
    seed: int = 0
    shuffle: bool = True

    def __post_init__(self) -> None:
        if self.num_samples < 1:
            raise ValueError("the dataset has no samples; give one with at least one sample")

    def samples(self, positions: Sequence[int] | Indices) -> Indices:
        """The sample indices at these positions.

        Args:
            positions: Positions in the run, 0 or above; shape `(n,)`.

        Returns:
            Indices from 0 to num_samples - 1; shape `(n,)`.
        """
        asked = np.asarray(positions, dtype=np.int64)
        if not self.shuffle:
            return asked % self.num_samples
        found = np.empty_like(asked)
        epochs = asked // self.num_samples
        for epoch in np.unique(epochs):
            chosen = epochs == epoch
            found[chosen] = self._permute(asked[chosen] % self.num_samples, int(epoch))
        return found

    def _permute(self, offsets: Indices, epoch: int) -> Indices:
        """Walk each offset along its cycle until it falls inside the dataset.

        The cycle is one of the larger permutation. The result is a permutation, too. The domain is less than four
        times the dataset, so that a walk takes fewer than four steps on average.
        """
        half_bits = max(1, (max(self.num_samples - 1, 1).bit_length() + 1) // 2)
        keys = _round_keys(self.seed, epoch)
        values = _feistel(offsets.astype(np.uint64), half_bits, keys)
        outside = values >= self.num_samples
        while outside.any():
            values[outside] = _feistel(values[outside], half_bits, keys)
            outside = values >= self.num_samples
        return values.astype(np.int64)


def _round_keys(seed: int, epoch: int) -> list[int]:
    """Keys from SplitMix64 (Steele, Lea and Flood, 2014), started from both numbers."""
    state = _mix((seed & _MASK) ^ _mix(epoch + 1))
    return [_mix(state + (index + 1) * 0x9E3779B97F4A7C15) for index in range(_NUM_ROUNDS)]


def _mix(value: int) -> int:
    value &= _MASK
    value = ((value ^ (value >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    value = ((value ^ (value >> 27)) * 0x94D049BB133111EB) & _MASK
    return value ^ (value >> 31)


def _feistel(values: _Words, half_bits: int, keys: Sequence[int]) -> _Words:
    """Permute words of 2 * half_bits bits. Unsigned arithmetic of numpy wraps around, as this needs."""
    mask = np.uint64((1 << half_bits) - 1)
    shift = np.uint64(half_bits)
    left, right = values >> shift, values & mask
    for key in keys:
        mixed = (right ^ np.uint64(key)) * np.uint64(0xBF58476D1CE4E5B9)
        mixed = (mixed ^ (mixed >> np.uint64(31))) * np.uint64(0x94D049BB133111EB)
        mixed ^= mixed >> np.uint64(29)
        left, right = right, left ^ (mixed & mask)
    return (left << shift) | right
