"""The order of samples: a pure function of seed, epoch and position. It is the same at any world size.

A run reads positions 0, 1, 2, ... without end, epoch after epoch. `DataOrder` is the protocol, and `Permutation` the
order of a session: each epoch is a different permutation of the dataset. The permutation is computed, not stored: a
Feistel network on the smallest even number of bits that holds N, with cycle walking (Black and Rogaway, "Ciphers with
Arbitrary Finite Domains", 2002). So every rank finds any position of any epoch in constant time and memory, and
nothing has to be saved to resume.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar, Protocol

import numpy as np
import numpy.typing as npt

Indices = npt.NDArray[np.int64]
_Words = npt.NDArray[np.uint64]

ENDLESS = 1 << 62
"""Samples of data without an end: more than any run reads."""
FINGERPRINT_BITS = 20
"""Few enough that the sum of their squares over the ranks is exact as a float."""
_NUM_ROUNDS = 8
_MASK = (1 << 64) - 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Epoch:
    """One epoch of an order.

    Attributes:
        number: Its number, from 0.
        positions: Its positions in the order of the run.
        fingerprint: A number of `FINGERPRINT_BITS` bits, the same for the same order.
        ends: Where the batches of the script's own end, counted from the start of the epoch. None: a batch has the
            size that the job says.
    """

    number: int
    positions: range
    fingerprint: int
    ends: Indices | None = None

    def num_batches(self, global_batch: int) -> int:
        """How many batches the epoch has. The last holds what is left."""
        return len(self.ends) if self.ends is not None else -(-len(self.positions) // global_batch)

    def batch(self, index: int, global_batch: int) -> range:
        """The positions of one of its batches."""
        if self.ends is None:
            return self.positions[index * global_batch : (index + 1) * global_batch]
        return self.positions[int(self.ends[index - 1]) if index else 0 : int(self.ends[index])]


class DataOrder(Protocol):
    """Which sample is at which position: a pure function of seed, epoch and position."""

    @property
    def kind(self) -> str:
        """What a commit calls it: a run can't be resumed in an order of another kind."""
        ...

    @property
    def num_samples(self) -> int:
        """Samples of the data set; `ENDLESS` for data without an end, which have one epoch."""
        ...

    @property
    def seed(self) -> int:
        """Seed of the order, and of what a data set draws at random."""
        ...

    @property
    def is_regular(self) -> bool:
        """Whether all epochs have the same length, and none has batches of its own."""
        ...

    def samples(self, positions: Sequence[int] | Indices) -> Indices:
        """The sample indices at these positions.

        Args:
            positions: Positions in the run, 0 or above; shape `(n,)`.

        Returns:
            Indices from 0 to num_samples - 1; shape `(n,)`.
        """
        ...

    def epoch_at(self, position: int) -> Epoch:
        """The epoch to which a position belongs."""
        ...


def fingerprint(content: bytes) -> int:
    """A short hash, by which ranks compare their orders."""
    return int.from_bytes(hashlib.sha256(content).digest()[:8], "little") >> (64 - FINGERPRINT_BITS)


def endless_epoch(described: str) -> Epoch:
    """The one epoch of data without an end. `described` is the same for the same order."""
    return Epoch(number=0, positions=range(ENDLESS), fingerprint=fingerprint(described.encode()))


@dataclass(frozen=True, slots=True, kw_only=True)
class Permutation:
    """A different permutation of the data set in each epoch. Implements DataOrder.

    Attributes:
        num_samples: Samples of the data set.
        seed: Seed of the permutations.
        shuffle: False: samples 0, 1, 2, ... in every epoch.
    """

    KIND: ClassVar[str] = "permutation"

    num_samples: int
    seed: int = 0
    shuffle: bool = True

    def __post_init__(self) -> None:
        if self.num_samples < 1:
            raise ValueError("the dataset has no samples; give one with at least one sample")

    @property
    def kind(self) -> str:
        return self.KIND

    @property
    def is_regular(self) -> bool:
        return True

    def samples(self, positions: Sequence[int] | Indices) -> Indices:
        asked = np.asarray(positions, dtype=np.int64)
        if not self.shuffle:
            return asked % self.num_samples
        found = np.empty_like(asked)
        epochs = asked // self.num_samples
        for epoch in np.unique(epochs):
            chosen = epochs == epoch
            found[chosen] = permute(asked[chosen] % self.num_samples, self.num_samples, self.seed, int(epoch))
        return found

    def epoch_at(self, position: int) -> Epoch:
        number = position // self.num_samples
        return Epoch(
            number=number,
            positions=range(number * self.num_samples, (number + 1) * self.num_samples),
            fingerprint=fingerprint(f"{self.num_samples}/{self.seed}/{self.shuffle}".encode()),
        )


def permute(offsets: Indices, sizes: Indices | int, seed: int, numbers: Indices | int) -> Indices:
    """Where permutations send offsets.

    Each offset is walked along its cycle until it falls below the size of its permutation. The cycle is one of a
    larger permutation. The result is a permutation, too. The domain is less than four times the size, so that a walk
    takes fewer than four steps on average.

    Args:
        offsets: What to permute; shape `(n,)`.
        sizes: Of each offset, how many numbers its permutation has; or one size for all.
        seed: Seed of the permutations.
        numbers: Of each offset, which permutation is its own; or one for all. It has one size.

    Returns:
        Their places, each below its size; shape `(n,)`.
    """
    of_each = np.broadcast_to(sizes, offsets.shape)
    distinct, which = np.unique(of_each, return_inverse=True)
    half_bits = np.array([_half_bits(each) for each in distinct.tolist()], np.uint64)[which]
    distinct, which = np.unique(np.broadcast_to(numbers, offsets.shape), return_inverse=True)
    keys = _round_keys(seed, distinct)[:, which]
    values = _feistel(offsets.astype(np.uint64), half_bits, keys)
    while (outside := np.flatnonzero(values >= of_each)).size:
        values[outside] = _feistel(values[outside], half_bits[outside], keys[:, outside])
    return values.astype(np.int64)


def _half_bits(size: int) -> int:
    return max(1, (max(size - 1, 1).bit_length() + 1) // 2)


def _round_keys(seed: int, numbers: Indices) -> _Words:
    """Keys of each round and number, from SplitMix64 (Steele, Lea and Flood, 2014), started from seed and number."""
    state = _mix(np.uint64(seed & _MASK) ^ _mix(numbers.astype(np.uint64) + np.uint64(1)))
    rounds = np.arange(1, _NUM_ROUNDS + 1, dtype=np.uint64)[:, None]
    return _mix(state + rounds * np.uint64(0x9E3779B97F4A7C15))


def _mix(words: _Words) -> _Words:
    words = (words ^ (words >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    words = (words ^ (words >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return words ^ (words >> np.uint64(31))


def _feistel(values: _Words, half_bits: _Words, keys: _Words) -> _Words:
    """Permute words of 2 * half_bits bits. Unsigned arithmetic of numpy wraps around, as this needs.

    Args:
        values: The words; shape `(n,)`.
        half_bits: Of each word; shape `(n,)`.
        keys: Of each round and word; shape `(rounds, n)`.

    Returns:
        What they become; shape `(n,)`.
    """
    mask = (np.uint64(1) << half_bits) - np.uint64(1)
    left, right = values >> half_bits, values & mask
    for key in keys:
        mixed = (right ^ key) * np.uint64(0xBF58476D1CE4E5B9)
        mixed = (mixed ^ (mixed >> np.uint64(31))) * np.uint64(0x94D049BB133111EB)
        mixed ^= mixed >> np.uint64(29)
        left, right = right, left ^ (mixed & mask)
    return (left << half_bits) | right
