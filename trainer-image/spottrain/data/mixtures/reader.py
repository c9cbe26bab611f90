"""Reading the items of a mixture that has streams among its sources."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from spottrain.data.batch import MicroBatch
from spottrain.data.by_index import ByIndex
from spottrain.data.mixtures.dataset import Mixture
from spottrain.data.streams.cursor import Mark
from spottrain.data.streams.marks import StreamMarks
from spottrain.data.streams.reader import StreamReader


class MixtureReader:
    """Reads items by index, and those of streams forwards. Implements Items."""

    def __init__(self, mixture: Mixture, marks: StreamMarks, seed: int) -> None:
        """Begin at the marks of the streams. `seed` is that of what items by index draw at random."""
        self._num_by_index = len(mixture)
        self._by_index = ByIndex(mixture, seed)
        self._streams = StreamReader(mixture.make_stream, marks)
        self._global_batch = marks.streams.global_batch

    def items(self, micro_batch: MicroBatch, samples: Sequence[int]) -> list[Any]:
        step = micro_batch.batch.start // self._global_batch
        return [
            self._streams.item(sample - self._num_by_index, step)
            if sample >= self._num_by_index
            else self._by_index.item(position, sample)
            for position, sample in zip(micro_batch.positions, samples, strict=True)
        ]

    def pop_marks(self) -> dict[int, list[Mark]]:
        return self._streams.pop_marks()
