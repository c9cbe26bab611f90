"""The order of the items of several streams: a pure function, by which a rank reads few streams.

A batch takes the same slots from the streams in each step, and a rank's part of a batch lies in few streams. So a
rank reads few of them, each forwards, at any world size. Streams have no end: one that has ended begins again.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Protocol

import numpy as np

from spottrain.data.order import ENDLESS, Epoch, Indices, endless_epoch, permute


class StreamPlaces(Protocol):
    """Where the items of streams are in a run. The index of an item is `place * streams + stream`.

    Attributes:
        seed: Seed of what the streams draw at random.
        num_streams: How many there are.
        global_batch: Samples of a step.
    """

    seed: int
    num_streams: int
    global_batch: int

    def name_of(self, stream: int) -> str:
        """What messages call a stream."""
        ...

    def streams_of(self, share: range) -> Collection[int]:
        """The streams of a rank's part of a batch. Each is that of one rank at least."""
        ...

    def oldest(self, stream: int, step: int) -> int:
        """A place of a stream before which steps from this one on, counted from 0, need no item."""
        ...


class StreamOrder:
    """The order of the items of streams. Implements DataOrder and StreamPlaces.

    The index of an item is `place * streams + stream`: its place counts the items that were read from its stream
    before, over all passes.

    Attributes:
        seed: Seed of the shuffling.
        num_streams: Streams, of which each has a slot of the batch at least.
        global_batch: Items of a batch.
    """

    num_samples = ENDLESS
    is_regular = True

    def __init__(self, *, streams: int, seed: int, shuffle: bool, global_batch: int, window: int) -> None:
        """Deal the slots of a batch to the streams.

        Args:
            streams: How many there are.
            seed: Seed of the shuffling.
            shuffle: Whether to shuffle at all.
            global_batch: Items of a batch.
            window: Items of a stream that are shuffled together.

        Raises:
            ValueError: There are more streams than items in a batch.
        """
        if streams > global_batch:
            raise ValueError(
                f"the data have {streams} streams, and batch.global is {global_batch}: every step takes an item of "
                "each stream. Make fewer streams, or raise batch.global"
            )
        self.seed = seed
        self.num_streams = streams
        self.global_batch = global_batch
        self._window = window if shuffle else 1
        self._slots = np.arange(streams + 1) * global_batch // streams

    @property
    def kind(self) -> str:
        return f"{self.num_streams} streams, window {self._window}"

    def samples(self, positions: Sequence[int] | Indices) -> Indices:
        streams, places = self.places(positions)
        return places * self.num_streams + streams

    def epoch_at(self, position: int) -> Epoch:
        return endless_epoch(f"{self.kind}/{self.seed}/{self.global_batch}")

    def places(self, positions: Sequence[int] | Indices) -> tuple[Indices, Indices]:
        """The stream of each position, and the place of its item there."""
        steps, slots = np.divmod(np.asarray(positions, dtype=np.int64), self.global_batch)
        streams = np.searchsorted(self._slots, slots, side="right") - 1
        turns = steps * np.diff(self._slots)[streams] + slots - self._slots[streams]
        return streams, self._shuffled(turns, streams) if self._window > 1 else turns

    def name_of(self, stream: int) -> str:
        return f"stream {stream}"

    def streams_of(self, share: range) -> range:
        """The streams of which a rank needs items, if `share` is its part of a batch."""
        if not share:
            return range(0)
        first, last = np.searchsorted(self._slots, [share.start, share.stop - 1], side="right") - 1
        return range(int(first), int(last) + 1)

    def oldest(self, stream: int, step: int) -> int:
        """The first place of a stream that steps from this one on, counted from 0, may need."""
        turn = step * int(self._slots[stream + 1] - self._slots[stream])
        return turn - turn % self._window

    def _shuffled(self, turns: Indices, streams: Indices) -> Indices:
        """Permute the places in each window of each stream."""
        windows = turns // self._window
        begins = windows * self._window
        found: Indices = begins + permute(
            turns - begins, self._window, self.seed, windows * self.num_streams + streams
        )
        return found
