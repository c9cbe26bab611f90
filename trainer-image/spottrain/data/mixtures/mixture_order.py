"""The order of a mixture of data sets: a pure function, in which each source has an order of its own.

A step has as many samples of each source as its weight says, so that the counts since the first step are closest to
the shares. Inside a batch, the samples of each source are spread evenly, in their order. So each rank's part has
about the same share of all sources.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache

import numpy as np

from spottrain.data.mixtures.apportionment import Weights, apportioned
from spottrain.data.order import ENDLESS, DataOrder, Epoch, Indices, endless_epoch, fingerprint
from spottrain.data.shards.shard_order import ShardOrder


@dataclass(frozen=True, slots=True, kw_only=True)
class Source:
    """A source of a mixture.

    Attributes:
        name: Its name.
        order: The order of its samples. It has no end: epochs follow each other.
        offset: Samples of the sources before it.
    """

    name: str
    order: DataOrder
    offset: int


@dataclass(frozen=True, slots=True, eq=False)
class _Phase:
    """Steps with the same weights: the number of the first, and the samples of each source before it."""

    first_step: int
    weights: Weights
    before: Indices


class MixtureOrder:
    """The order of a mixture. Implements DataOrder. A sample's index counts through the sources.

    Attributes:
        seed: Seed of what a data set draws at random.
        sources: The sources.
    """

    num_samples = ENDLESS
    is_regular = True

    def __init__(
        self, sources: Sequence[Source], weights: Mapping[int, Weights], *, seed: int, global_batch: int
    ) -> None:
        """Count the samples of each source up to each change of the weights.

        Args:
            sources: The sources.
            weights: Of each source, by the number of the step from which they hold, from 0. Each sum is 1.
            seed: Seed of what a data set draws at random.
            global_batch: Samples of a step.
        """
        self.seed = seed
        self.sources = tuple(sources)
        self._global_batch = global_batch
        self._phases: list[_Phase] = []
        for first_step in sorted(weights):
            before = self.counts(first_step) if self._phases else np.zeros(len(sources), np.int64)
            self._phases.append(_Phase(first_step, weights[first_step], before))
        self._places_of = lru_cache(maxsize=4)(self._place)

    @property
    def kind(self) -> str:
        first = self._phases[0].weights
        named = ", ".join(
            f"{source.name} {weight:.4g} ({source.order.kind} of {source.order.num_samples} samples)"
            for source, weight in zip(self.sources, first, strict=True)
        )
        return f"mixture {self._fingerprint:x} of {named}"

    @property
    def _fingerprint(self) -> int:
        weights = [(phase.first_step, phase.weights.tolist()) for phase in self._phases]
        sources = [(source.name, source.order.epoch_at(0).fingerprint) for source in self.sources]
        return fingerprint(repr((weights, sources)).encode())

    def samples(self, positions: Sequence[int] | Indices) -> Indices:
        steps, slots = np.divmod(np.asarray(positions, dtype=np.int64), self._global_batch)
        numbers, places = np.empty_like(steps), np.empty_like(steps)
        for step in np.unique(steps).tolist():
            chosen = steps == step
            of_step, there = self._places_of(step)
            numbers[chosen], places[chosen] = of_step[slots[chosen]], there[slots[chosen]]
        found = np.empty_like(steps)
        for number in np.unique(numbers).tolist():
            chosen, source = numbers == number, self.sources[number]
            found[chosen] = source.offset + source.order.samples(places[chosen])
        return found

    def epoch_at(self, position: int) -> Epoch:
        return endless_epoch(f"{self._fingerprint}/{self.seed}/{self._global_batch}")

    def counts(self, step: int) -> Indices:
        """Samples of each source that the steps before this one use, counted from 0."""
        phase = self._phases[bisect_right(self._phases, step, key=lambda each: each.first_step) - 1]
        return phase.before + apportioned((step - phase.first_step) * self._global_batch, phase.weights)

    def upcoming(self, number: int, step: int) -> Iterator[int]:
        """The shards that steps from this one on need of a source in shards, in order of their first use."""
        order = self.sources[number].order
        assert isinstance(order, ShardOrder)
        return order.upcoming(int(self.counts(step)[number]), order.whole_batch, by_epoch=False)

    def _place(self, step: int) -> tuple[Indices, Indices]:
        """The source of each slot of a step, and the place in the order of that source."""
        before = self.counts(step)
        numbers_of = np.diff([before, self.counts(step + 1)], axis=0)[0]
        numbers = np.repeat(np.arange(len(self.sources)), numbers_of)
        turns = np.concatenate([np.arange(number) for number in numbers_of])
        row = np.lexsort((numbers, (turns + 0.5) / numbers_of[numbers]))
        return numbers[row], (before[numbers] + turns)[row]
