"""The order of samples in shards: a pure function in which every node reads few shards at a time.

An epoch permutes the shards, and lays their samples side by side. That row is cut into lanes. A batch takes the same
slots from the lanes in each step, and a rank's part of a batch lies in few lanes. So a rank reads few lanes, each
from its beginning to its end, at any world size. Inside a lane, samples are shuffled in windows. Nothing is held for
each sample: a position is looked up by arithmetic, and by the sums of the shards' lengths.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache

import numpy as np

from spottrain.data.order import Epoch, Indices, fingerprint, permute
from spottrain.data.shards.index import ShardIndex

# The seeds of the two permutations differ.
_OF_SHARDS = 0x5BD1E995


@dataclass(frozen=True, slots=True, eq=False)
class _Layout:
    """The shards of an epoch in their order.

    Attributes:
        shards: Their numbers; shape `(shards,)`.
        ends: Where each one's samples end in the row of all samples.
    """

    shards: Indices
    ends: Indices


class ShardOrder:
    """The order of samples in shards. Implements DataOrder. A sample's index counts through the shards of the index.

    Attributes:
        kind: What a commit calls it, with the fingerprint of the index.
        seed: Seed of the permutations.
        num_samples: Samples of all shards.
        num_lanes: Parts of an epoch that are read side by side. Each has a slot of the batch at least.
        block: Samples of a window.
    """

    is_regular = True

    def __init__(
        self, index: ShardIndex, *, seed: int, shuffle: bool, global_batch: int, window: int, lanes: int
    ) -> None:
        """Lay out the lanes.

        Args:
            index: The shards.
            seed: Seed of the permutations.
            shuffle: False: shards and samples keep their order, and the lanes remain.
            global_batch: Samples of a batch.
            window: Shards in which samples are shuffled.
            lanes: Parts of an epoch that are read side by side.

        Raises:
            ValueError: The shards have no samples.
        """
        self.seed = seed
        self.num_samples = index.num_samples
        if self.num_samples < 1:
            raise ValueError("the dataset has no samples; give one with at least one sample")
        self.num_lanes = min(lanes, global_batch)
        self.block = max(1, window * self.num_samples // len(index.names))
        self._index = index
        self._shuffle = shuffle
        self._global_batch = global_batch
        self._window = window
        self._begins = np.cumsum(index.samples) - index.samples
        self._slots = np.arange(self.num_lanes + 1) * global_batch // self.num_lanes
        # A lane has the samples of its slots in every row of a batch. The last row may lack some.
        rows, last = divmod(self.num_samples, global_batch)
        self._lane_begins = rows * self._slots + np.minimum(self._slots, last)
        self._layout_of = lru_cache(maxsize=3)(self._lay_out)
        self.kind = f"shards {index.fingerprint}, {self.num_lanes} lanes, window {window}"
        self._fingerprint = fingerprint(f"{self.kind}/{seed}/{shuffle}".encode())

    @property
    def whole_batch(self) -> range:
        """The slots of a batch."""
        return range(self._global_batch)

    def samples(self, positions: Sequence[int] | Indices) -> Indices:
        asked = np.asarray(positions, dtype=np.int64)
        found = np.empty_like(asked)
        for epoch in np.unique(asked // self.num_samples):
            chosen = asked // self.num_samples == epoch
            found[chosen] = self._of_epoch(asked[chosen] % self.num_samples, int(epoch))
        return found

    def epoch_at(self, position: int) -> Epoch:
        number = position // self.num_samples
        return Epoch(
            number=number,
            positions=range(number * self.num_samples, (number + 1) * self.num_samples),
            fingerprint=self._fingerprint,
        )

    def upcoming(self, position: int, share: range, *, by_epoch: bool) -> Iterator[int]:
        """The shards of which a node needs samples from a position on, in order of their first use in an epoch.

        Args:
            position: Where the next batch begins.
            share: The node's part of a batch: offsets from its beginning.
            by_epoch: Whether each epoch begins with a batch.

        Yields:
            Their numbers: of the rest of this epoch, and of the next one.
        """
        current = position // self.num_samples
        for epoch in (current, current + 1):
            offset = position - epoch * self.num_samples
            shift = 0 if by_epoch else offset % self._global_batch
            slots = np.unique((shift + np.arange(share.start, share.stop)) % self._global_batch)
            lanes = np.unique(np.searchsorted(self._slots, slots, side="right") - 1)
            yield from self._shards_of(lanes, max(0, offset) // self._global_batch, epoch)

    def side_by_side(self, share: range) -> int:
        """How many shards a node reads at once, if `share` is its part of a batch."""
        lanes = np.unique(np.searchsorted(self._slots, np.arange(share.start, share.stop), side="right"))
        return len(lanes) * (self._window + 1)

    def _shards_of(self, lanes: Indices, row: int, epoch: int) -> Iterator[int]:
        layout = self._layout_of(epoch)
        widths = np.diff(self._slots)[lanes]
        begins, ends = self._lane_begins[lanes], self._lane_begins[lanes + 1]
        firsts = row * widths // self.block
        seen: set[int] = set()
        num_blocks = -(-(ends - begins) // self.block)
        for ahead in range(int(num_blocks.max(initial=0))):
            for begin, end, first in zip(begins, ends, firsts, strict=True):
                start = begin + (first + ahead) * self.block
                if start < end:
                    low, high = np.searchsorted(layout.ends, [start, min(start + self.block, end) - 1], side="right")
                    new = [each for each in layout.shards[low : high + 1].tolist() if each not in seen]
                    seen.update(new)
                    yield from new

    def _of_epoch(self, offsets: Indices, epoch: int) -> Indices:
        rows, slots = np.divmod(offsets, self._global_batch)
        lanes = np.searchsorted(self._slots, slots, side="right") - 1
        places = rows * np.diff(self._slots)[lanes] + slots - self._slots[lanes]
        if self._shuffle:
            places = self._shuffled(places, lanes, epoch)
        row = self._lane_begins[lanes] + places
        layout = self._layout_of(epoch)
        order = np.searchsorted(layout.ends, row, side="right")
        shards = layout.shards[order]
        found: Indices = self._begins[shards] + row - (layout.ends[order] - self._index.samples[shards])
        return found

    def _shuffled(self, places: Indices, lanes: Indices, epoch: int) -> Indices:
        """Permute the places in each window of each lane."""
        windows = places // self.block
        begins = windows * self.block
        sizes = np.minimum(self.block, np.diff(self._lane_begins)[lanes] - begins)
        numbers = (epoch * self.num_lanes + lanes) << 32 | windows
        found: Indices = begins + permute(places - begins, sizes, self.seed, numbers)
        return found

    def _lay_out(self, epoch: int) -> _Layout:
        shards = np.arange(len(self._index.names))
        if self._shuffle:
            shards = permute(shards, len(shards), self.seed ^ _OF_SHARDS, epoch)
        return _Layout(shards, np.cumsum(self._index.samples[shards]))
