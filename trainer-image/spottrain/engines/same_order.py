"""Check that all ranks act in the same order, in which their collectives meet."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import zip_longest
from typing import Any

import torch
import torch.distributed as dist

from spottrain import exchange
from spottrain.world.launch import gloo_group


@dataclass(frozen=True, slots=True)
class Difference:
    """The first difference: what rank 0 did, and what `rank` did instead."""

    first: str
    rank: int
    other: str


class SameOrder:
    """Compares the order in which ranks act.

    It records what one rank does, by index among `names`, and compares it with the other ranks. The constructor is a
    collective.
    """

    def __init__(self, names: Sequence[str]) -> None:
        self._names = names
        self._done: list[int] = []
        # A group of its own: the collectives of other groups may no longer match.
        self._group = gloo_group()

    def note(self, index: int, *, once: bool = False) -> Callable[..., None]:
        """A hook that records the thing at that index.

        With `once`, the hook records it only if it is not recorded yet.
        """

        def note(*_: Any) -> None:
            if not (once and index in self._done):
                self._done.append(index)

        return note

    def forget(self) -> None:
        """Drop what was recorded since the last comparison."""
        self._done = []

    def compare(self) -> None:
        """Start to compare what was recorded since the last time, by two numbers. A collective that does not wait."""
        digest = hash(tuple(self._done)) >> 1
        self._extremes = torch.tensor([digest, -digest])
        self._compared, self._done = self._done, []
        self._work = dist.all_reduce(self._extremes, op=dist.ReduceOp.MAX, group=self._group, async_op=True)

    def difference(self) -> Difference | None:
        """Wait for the result of the comparison, the same on all ranks."""
        self._work.wait()
        return self._first_difference() if self._extremes.sum() != 0 else None

    def _first_difference(self) -> Difference:
        every = exchange.all_gather(self._compared, self._group)
        rank = next(rank for rank, done in enumerate(every) if done != every[0])
        first, other = next((a, b) for a, b in zip_longest(every[0], every[rank]) if a != b)
        return Difference(self._name(first), rank, self._name(other))

    def _name(self, index: int | None) -> str:
        return "no more" if index is None else self._names[index]
