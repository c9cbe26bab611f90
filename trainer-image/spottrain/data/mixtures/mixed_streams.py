"""The streams of all sources of a mixture, numbered through."""

from __future__ import annotations

import hashlib
from bisect import bisect_right
from collections.abc import Mapping
from itertools import accumulate

import numpy as np

from spottrain.data.mixtures.shares import Shares
from spottrain.data.order import Indices
from spottrain.data.streams.stream_order import StreamOrder


class MixedStreams:
    """Where the items of a mixture's streams are. Implements StreamPlaces.

    Streams of a source take turns, one item each. So the number of items that were read from each follows from the
    number of the source's samples.

    Attributes:
        seed: Seed of what the streams draw at random.
        num_streams: Streams of all sources.
        global_batch: Samples of a step.
    """

    def __init__(self, sources: Mapping[int, tuple[str, StreamOrder]], shares: Shares, *, seed: int) -> None:
        """Number the streams.

        Args:
            sources: By the number of a source, its name and the order of its streams.
            shares: How many samples of each source a step has.
            seed: Seed of the mixture.
        """
        self.seed = int.from_bytes(hashlib.sha256(f"{seed}/streams".encode()).digest()[:8], "little")
        self.global_batch = shares.global_batch
        self._shares = shares
        self._numbers = list(sources)
        self._names = [name for name, _ in sources.values()]
        self._orders = [order for _, order in sources.values()]
        self._ends = list(accumulate(order.num_streams for order in self._orders))
        self.num_streams = self._ends[-1]
        self._rows = (-1, self._shares.before(0))  # of the newest step that was asked for

    def numbered(self, number: int, indices: Indices) -> Indices:
        """The indices of items of a source among those of all streams, by their indices in the source."""
        at = self._numbers.index(number)
        places, streams = np.divmod(indices, self._orders[at].num_streams)
        return places * self.num_streams + self._begin(at) + streams

    def name_of(self, stream: int) -> str:
        at = bisect_right(self._ends, stream)
        return f"stream {stream - self._begin(at)} of {self._names[at]}"

    def streams_of(self, share: range) -> frozenset[int]:
        """The streams whose parts of a batch begin in a rank's part."""
        found = (
            self._begin(at) + stream
            for at, order in enumerate(self._orders)
            for stream in range(order.num_streams)
            if stream * self.global_batch // order.num_streams in share
        )
        return frozenset(found)

    def oldest(self, stream: int, step: int) -> int:
        if self._rows[0] != step:
            self._rows = step, self._shares.before(step)
        at = bisect_right(self._ends, stream)
        order = self._orders[at]
        return order.oldest(stream - self._begin(at), int(self._rows[1][self._numbers[at]]) // order.num_streams)

    def _begin(self, at: int) -> int:
        return self._ends[at - 1] if at else 0
