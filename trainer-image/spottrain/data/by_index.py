"""Fetching the items of micro-batches from a data set by index.

What an item draws at random depends on seed and position alone. To seed the generators takes several times as long as
to read a small item. So items that draw nothing are fetched together, with the generators seeded once. If these show
afterwards that an item has drawn, the items are fetched again one by one, each with a seed of its own.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from spottrain.data import random_state
from spottrain.data.batch import MicroBatch
from spottrain.data.items import MapDataset, get_items
from spottrain.data.streams.cursor import Mark

# Neither a position nor the number of an epoch.
_OF_NO_ITEM = -(1 << 63)


class ByIndex:
    """Items of a data set. Implements Items."""

    def __init__(self, dataset: MapDataset, seed: int) -> None:
        self._dataset = dataset
        self._seed = seed
        self._draw: bool | None = None  # whether items draw at random; None: not known yet
        self._undrawn: Any = None

    def items(self, micro_batch: MicroBatch, samples: Sequence[int]) -> list[Any]:
        # The generators are then where the last item has left them: `collate` may draw, too.
        found = self._together(samples) if self._draw is False else None
        if found is not None:
            random_state.seed_host(self._seed, step=micro_batch.positions[-1])
            return found
        found = [self.item(*each) for each in zip(micro_batch.positions, samples, strict=True)]
        if self._draw is None:
            with random_state.host_untouched():
                drawn = random_state.draw_from_host()
                self._draw = drawn != self._first_draw(micro_batch.positions[-1])
                self._undrawn = self._first_draw(_OF_NO_ITEM)
        return found

    def pop_marks(self) -> dict[int, list[Mark]]:
        return {}

    def _together(self, samples: Sequence[int]) -> list[Any] | None:
        """Fetch items that draw nothing; None if one has drawn."""
        random_state.seed_host(self._seed, step=_OF_NO_ITEM)
        try:
            found = get_items(self._dataset, samples)
        except Exception:
            if self._note_draw():  # what is wrong may be so only with these random numbers
                return None
            raise
        return None if self._note_draw() else found

    def _note_draw(self) -> bool:
        self._draw = random_state.draw_from_host() != self._undrawn
        return self._draw

    def _first_draw(self, step: int) -> Any:
        random_state.seed_host(self._seed, step=step)
        return random_state.draw_from_host()

    def item(self, position: int, sample: int) -> Any:
        """The item of a sample. What it draws depends on its position in the run alone."""
        random_state.seed_host(self._seed, step=position)
        return self._dataset[sample]
