"""Whether all ranks did the same things in the same order, as their collectives meet in that order."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import zip_longest
from typing import Any

import torch
import torch.distributed as dist

from spottrain.world.launch import gloo_group


@dataclass(frozen=True, slots=True)
class Difference:
    """The first: what rank 0 did where `rank` did another thing."""

    first: str
    rank: int
    other: str


class SameOrder:
    """Of one rank: notes what it does, each thing by its place among `names`. Made on all ranks at once."""

    def __init__(self, names: Sequence[str]) -> None:
        self._names = names
        self._done: list[int] = []
        # Its own, as other collectives of the ranks may no longer fit each other.
        self._group = gloo_group()

    def note(self, index: int, *, once: bool = False) -> Callable[..., None]:
        """A hook that notes the thing at that place; `once` only where it isn't noted yet."""

        def note(*_: Any) -> None:
            if not (once and index in self._done):
                self._done.append(index)

        return note

    def forget(self) -> None:
        """What was noted since the last comparison."""
        self._done = []

    def compare(self) -> None:
        """Begin to compare what was noted since the last time: two numbers. A collective that nobody waits for."""
        digest = hash(tuple(self._done)) >> 1
        self._extremes = torch.tensor([digest, -digest])
        self._compared, self._done = self._done, []
        self._work = dist.all_reduce(self._extremes, op=dist.ReduceOp.MAX, group=self._group, async_op=True)

    def difference(self) -> Difference | None:
        """What the comparison has found, the same on all ranks; waits for it."""
        self._work.wait()
        return self._first_difference() if self._extremes.sum() != 0 else None

    def _first_difference(self) -> Difference:
        every: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(every, self._compared, group=self._group)
        rank = next(rank for rank, done in enumerate(every) if done != every[0])
        first, other = next((a, b) for a, b in zip_longest(every[0], every[rank]) if a != b)
        return Difference(self._name(first), rank, self._name(other))

    def _name(self, index: int | None) -> str:
        return "no more" if index is None else self._names[index]
