"""Where the items of a micro-batch come from."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from typing import Any, Protocol, runtime_checkable

from spottrain.data.batch import MicroBatch
from spottrain.data.streams.cursor import Mark


class MapDataset(Protocol):
    """Any data set with a length and items by index. A list is one, and so is a torch Dataset."""

    def __len__(self) -> int: ...

    def __getitem__(self, index: int, /) -> Any: ...


@runtime_checkable
class NamesItems(Protocol):
    """A data set that knows where its samples are."""

    def name_of(self, index: int) -> str:
        """What messages call a sample."""
        ...


def name_of(dataset: Any, index: int) -> str:
    """What messages call a sample of a data set."""
    return dataset.name_of(index) if isinstance(dataset, NamesItems) else f"sample {index}"


class Items(Protocol):
    """Fetches the items of micro-batches, in one process."""

    def items(self, micro_batch: MicroBatch, samples: Sequence[int]) -> list[Any]:
        """The items of a micro-batch, by their indices in the order."""
        ...

    def pop_marks(self) -> dict[int, list[Mark]]:
        """Where streams can be read on from, by their numbers: what is new since the last call."""
        ...


def get_items(dataset: MapDataset, indices: Sequence[int]) -> list[Any]:
    """Several items, by `__getitems__` if the data set has it, as torch's DataLoader does."""
    if (several := getattr(dataset, "__getitems__", None)) is not None:
        found: list[Any] = several(indices)
        return found
    return [dataset[index] for index in indices]


def places_by_part(indices: Sequence[int], ends: Sequence[int]) -> dict[int, list[int]]:
    """Which places of `indices` ask for samples of which part.

    Args:
        indices: Numbers of samples.
        ends: For each part, one more than the number of its last sample.

    Returns:
        The places by the number of the part, in order.

    Raises:
        IndexError: There is no such sample.
    """
    asked: dict[int, list[int]] = {}
    for place, index in enumerate(indices):
        if not 0 <= index < ends[-1]:
            raise IndexError(f"sample {index} of {ends[-1]}")
        asked.setdefault(bisect_right(ends, index), []).append(place)
    return asked
