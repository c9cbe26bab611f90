"""A mixture of data sets, to be passed as `dataset` to a session."""

from __future__ import annotations

import hashlib
import math
from bisect import bisect_right
from collections.abc import Iterable, Mapping, Sequence
from itertools import accumulate, islice
from typing import Any

import numpy as np

from spottrain.data.items import MapDataset, get_items, name_of, places_by_part
from spottrain.data.mixtures.apportionment import Weights
from spottrain.data.mixtures.mixture_order import MixtureOrder, Source
from spottrain.data.mixtures.shares import Shares
from spottrain.data.order import DataOrder, Permutation
from spottrain.data.shards.dataset import Shards
from spottrain.data.streams.dataset import Streams


class Mixture:
    """Data sets that a run reads side by side, each by its weight, in one order at any world size.

    Each source has an order and epochs of its own: a small one with a large weight is repeated more often.

    Attributes:
        sources: The data sets, in the order of their names.
    """

    def __init__(
        self,
        sources: Mapping[str, tuple[MapDataset | Streams, float]],
        *,
        changes: Mapping[int, Mapping[str, float]] | None = None,
    ) -> None:
        """Check the weights.

        Args:
            sources: By a name for each, a data set with items by index or `Streams`, and its weight: its share of
                the samples is its weight divided by the sum of all.
            changes: The weights of all sources, by the number of completed steps after which they hold.

        Raises:
            ValueError: The sources or weights make no mixture.

        Example:
            >>> from spottrain.data import Mixture
            >>> data = Mixture({"code": (["c0", "c1"], 1), "text": (["t0", "t1", "t2"], 2)})
            >>> order = data.order(seed=0, shuffle=False, global_batch=6)
            >>> [data[index] for index in order.samples(range(6))]
            ['t0', 'c0', 't1', 't2', 'c1', 't0']
        """
        self._names = list(sources)
        self.sources: list[MapDataset | Streams] = [source for source, _ in map(_pair, sources.items())]
        self._check_sources()
        self._ends = list(accumulate(0 if isinstance(each, Streams) else len(each) for each in self.sources))
        self._streams = [
            (each.make_stream, stream)
            for each in self.sources
            if isinstance(each, Streams)
            for stream in range(each.num_streams)
        ]
        first = {name: weight for name, (_, weight) in sources.items()}
        self._weights = {0: self._checked(first, "the weights of Mixture")}
        for step, weights in (changes or {}).items():
            if isinstance(step, bool) or not isinstance(step, int) or step < 1:
                raise ValueError(f"changes of Mixture has the step {step!r}; weights change after a step from 1 on")
            self._weights[step] = self._checked(weights, f"changes[{step}] of Mixture")

    @property
    def has_streams(self) -> bool:
        """Whether sources are streams."""
        return bool(self._streams)

    def make_stream(self, stream: int, number: int) -> Iterable[Any]:
        """Make one of the streams, numbered through the sources, for a pass."""
        make, own = self._streams[stream]
        return make(own, number)

    def __len__(self) -> int:
        """Samples of the sources that have an index."""
        return self._ends[-1]

    def __getitem__(self, index: int) -> Any:
        """The item of a source. Raises IndexError if there is no such sample."""
        return self.__getitems__([index])[0]

    def __getitems__(self, indices: Sequence[int]) -> list[Any]:
        """Items of the sources. Raises IndexError if there is no such sample."""
        found: list[Any] = [None] * len(indices)
        for number, places in places_by_part(indices, self._ends).items():
            source = self.sources[number]
            assert not isinstance(source, Streams)
            own = [indices[place] - self._begin(number) for place in places]
            for place, item in zip(places, get_items(source, own), strict=True):
                found[place] = item
        return found

    def name_of(self, index: int) -> str:
        """What messages call a sample, by its index in the order."""
        if index >= len(self):
            place, stream = divmod(index - len(self), len(self._streams))
            source, own = self._source_of_stream(stream)
            return f"item {place} of stream {own} of {source}"
        number = bisect_right(self._ends, index)
        return f"{name_of(self.sources[number], index - self._begin(number))} of {self._names[number]}"

    def _source_of_stream(self, stream: int) -> tuple[str, int]:
        named = (
            (name, own)
            for name, each in zip(self._names, self.sources, strict=True)
            if isinstance(each, Streams)
            for own in range(each.num_streams)
        )
        return next(islice(named, stream, None))

    def order(self, *, seed: int, shuffle: bool, global_batch: int) -> MixtureOrder:
        """The order in which a run reads the samples."""
        sources = [
            Source(
                name=name,
                order=self._order_of(number, seed=seed, shuffle=shuffle, global_batch=global_batch),
                offset=self._begin(number),
            )
            for number, name in enumerate(self._names)
        ]
        shares = Shares(self._weights, global_batch=global_batch)
        return MixtureOrder(sources, shares, seed=seed, num_by_index=len(self))

    def _order_of(self, number: int, *, seed: int, shuffle: bool, global_batch: int) -> DataOrder:
        source, named = self.sources[number], f"{seed}/{self._names[number]}"
        own = int.from_bytes(hashlib.sha256(named.encode()).digest()[:8], "little")
        if isinstance(source, Shards):
            share = max(1, round(global_batch * self._weights[0][number]))
            return source.order(seed=own, shuffle=shuffle, global_batch=share)
        if isinstance(source, Streams):  # they take turns, one item each
            return source.order(seed=own, shuffle=shuffle, global_batch=source.num_streams)
        return Permutation(num_samples=len(source), seed=own, shuffle=shuffle)

    def _begin(self, number: int) -> int:
        return self._ends[number - 1] if number else 0

    def _check_sources(self) -> None:
        if not self._names:
            raise ValueError("Mixture has no sources; give it one at least")
        first: dict[int, str] = {}
        for name, source in zip(self._names, self.sources, strict=True):
            if not isinstance(source, Streams):
                _check_has_items(name, source)
            if (before := first.setdefault(id(source), name)) != name:
                raise ValueError(
                    f"the sources {before} and {name} of Mixture are the same data set; name it once, with the "
                    "sum of the weights"
                )

    def _checked(self, weights: Mapping[str, float], what: str) -> Weights:
        if set(weights) != set(self._names):
            differing = sorted(set(weights) ^ set(self._names))
            raise ValueError(
                f"{what} have to name each source once: {', '.join(self._names)}; look at {differing[0]}"
            )
        for name, weight in weights.items():
            if not isinstance(weight, int | float) or not 0 <= weight < math.inf:
                raise ValueError(f"{what}: {name} has the weight {weight!r}; pass a number from 0 on")
        row = np.array([float(weights[name]) for name in self._names])
        if not row.sum() > 0:
            raise ValueError(f"{what} sum to nothing; give one source at least a weight above 0")
        shares: Weights = row / row.sum()
        return shares


def _check_has_items(name: str, source: Any) -> None:
    if isinstance(source, Mixture) or not hasattr(source, "__getitem__"):
        raise ValueError(
            f"the source {name} of Mixture is a {type(source).__name__}; pass a data set with items by index, or "
            "Streams"
        )
    if len(source) == 0:
        raise ValueError(f"the source {name} of Mixture has no samples; leave it out")


def _pair(named: tuple[str, Any]) -> tuple[Any, Any]:
    name, pair = named
    if not isinstance(pair, tuple) or len(pair) != 2:
        raise ValueError(f"the source {name} of Mixture is no pair; pass (data set, weight)")
    return pair
