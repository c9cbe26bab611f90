"""The order of a mixture of data sets: a pure function, in which each source has an order of its own.

A step has as many samples of each source as its weight says, so that the counts since the first step are closest to
the shares. Inside a batch, the samples of each source are spread evenly, in their order. So each rank's part has
about the same share of all sources. The items of streams take slots of their own, so that a rank reads few streams.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
import numpy.typing as npt

from spottrain.data.mixtures.mixed_streams import MixedStreams
from spottrain.data.mixtures.shares import Shares
from spottrain.data.order import ENDLESS, DataOrder, Epoch, Indices, endless_epoch, fingerprint
from spottrain.data.shards.shard_order import ShardOrder
from spottrain.data.streams.stream_order import StreamOrder


@dataclass(frozen=True, slots=True, kw_only=True)
class Source:
    """A source of a mixture.

    Attributes:
        name: Its name.
        order: The order of its samples. It has no end: epochs follow each other.
        offset: Samples of the sources before it that have an index.
    """

    name: str
    order: DataOrder
    offset: int


class MixtureOrder:
    """The order of a mixture. Implements DataOrder.

    A sample's index counts through the sources that have an index. After those come the items of streams.

    Attributes:
        seed: Seed of what a data set draws at random.
        sources: The sources.
        streams: The streams of all sources; None if there are none.
    """

    num_samples = ENDLESS
    is_regular = True

    def __init__(self, sources: Sequence[Source], shares: Shares, *, seed: int, num_by_index: int) -> None:
        """Lay out the streams.

        Args:
            sources: The sources.
            shares: How many samples of each source a step has.
            seed: Seed of what a data set draws at random.
            num_by_index: Samples of all sources that have an index.
        """
        self.seed = seed
        self.sources = tuple(sources)
        self._shares = shares
        self._num_by_index = num_by_index
        of_streams = {
            number: (source.name, source.order)
            for number, source in enumerate(sources)
            if isinstance(source.order, StreamOrder)
        }
        self.streams = MixedStreams(of_streams, shares, seed=seed) if of_streams else None
        self._places_of = lru_cache(maxsize=4)(self._place)

    @property
    def kind(self) -> str:
        _, first = self._shares.weights[0]
        named = ", ".join(
            f"{source.name} {weight:.4g} ({_described(source.order)})"
            for source, weight in zip(self.sources, first, strict=True)
        )
        return f"mixture {self._fingerprint:x} of {named}"

    @property
    def _fingerprint(self) -> int:
        sources = [(source.name, source.order.epoch_at(0).fingerprint) for source in self.sources]
        return fingerprint(repr((self._shares.weights, sources)).encode())

    def samples(self, positions: Sequence[int] | Indices) -> Indices:
        steps, slots = np.divmod(np.asarray(positions, dtype=np.int64), self._shares.global_batch)
        numbers, places = np.empty_like(steps), np.empty_like(steps)
        for step in np.unique(steps).tolist():
            chosen = steps == step
            of_step, there = self._places_of(step)
            numbers[chosen], places[chosen] = of_step[slots[chosen]], there[slots[chosen]]
        found = np.empty_like(steps)
        for number in np.unique(numbers).tolist():
            chosen = numbers == number
            found[chosen] = self._indices(number, places[chosen])
        return found

    def epoch_at(self, position: int) -> Epoch:
        return endless_epoch(f"{self._fingerprint}/{self.seed}/{self._shares.global_batch}")

    def upcoming(self, number: int, step: int) -> Iterator[int]:
        """The shards that steps from this one on need of a source in shards, in order of their first use."""
        order = self.sources[number].order
        assert isinstance(order, ShardOrder)
        return order.upcoming(int(self._shares.before(step)[number]), order.whole_batch, by_epoch=False)

    def _indices(self, number: int, places: Indices) -> Indices:
        """The indices of samples, by their places in the order of a source."""
        source = self.sources[number]
        own = source.order.samples(places)
        if self.streams is not None and isinstance(source.order, StreamOrder):
            return self._num_by_index + self.streams.numbered(number, own)
        return source.offset + own

    def _place(self, step: int) -> tuple[Indices, Indices]:
        """The source of each slot of a step, and the place in the order of that source."""
        before = self._shares.before(step)
        numbers_of = self._shares.before(step + 1) - before
        numbers = np.repeat(np.arange(len(self.sources)), numbers_of)
        turns = np.concatenate([np.arange(number) for number in numbers_of])
        places = before[numbers] + turns
        parts = (turns + 0.5) / numbers_of[numbers]
        of_streams = np.zeros(len(parts), bool)
        for number, source in enumerate(self.sources):
            if isinstance(source.order, StreamOrder):
                chosen = numbers == number
                of_streams |= chosen
                parts[chosen] = _parts_of_streams(places[chosen], source.order.num_streams)
        row = np.lexsort((numbers, parts))
        if of_streams.any():
            row = _in_slots(row, parts, of_streams)
        return numbers[row], places[row]


def _parts_of_streams(places: Indices, num_streams: int) -> npt.NDArray[np.float64]:
    """Where in a batch the items of streams lie, from 0 to 1: those of each stream always in the same part.

    Args:
        places: Their places in the order of the source, one after the other. Streams take turns there.
        num_streams: Streams of the source.
    """
    streams, turns = places % num_streams, np.arange(len(places)) // num_streams
    numbers_of = np.bincount(streams, minlength=num_streams)[streams]
    found: npt.NDArray[np.float64] = (streams + (turns + 0.5) / numbers_of) / num_streams
    return found


def _in_slots(row: Indices, parts: npt.NDArray[np.float64], of_streams: npt.NDArray[np.bool_]) -> Indices:
    """Lay a row out so that what is of streams lies in its part of the batch, or next to it if that is full.

    Args:
        row: What a batch has, in order of the parts.
        parts: Where each lies, from 0 to 1.
        of_streams: Whether it is of a stream.
    """
    fixed, free = row[of_streams[row]], row[~of_streams[row]]
    count = np.arange(len(fixed))
    slots = np.maximum.accumulate((parts[fixed] * len(row)).astype(np.int64) - count) + count
    slots = np.minimum(slots, len(row) - len(fixed) + count)
    found = np.empty_like(row)
    found[slots] = fixed
    is_free = np.ones(len(row), bool)
    is_free[slots] = False
    found[is_free] = free
    return found


def _described(order: DataOrder) -> str:
    return order.kind if order.num_samples == ENDLESS else f"{order.kind} of {order.num_samples} samples"
