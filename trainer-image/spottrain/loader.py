"""The batches of a rank, in the run's order."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping, MutableMapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch.utils.data import DataLoader, Dataset, get_worker_info

from spottrain import random_state
from spottrain.batch import BatchPlan
from spottrain.data_order import DataOrder

Collate = Callable[[list[Any]], Any]


class MapDataset(Protocol):
    """Any data set with a length and items by index, such as a list or a torch Dataset."""

    def __len__(self) -> int: ...

    def __getitem__(self, index: int, /) -> Any: ...


@dataclass(frozen=True, slots=True)
class Data:
    """A data set and how it is read: `collate` makes a batch of a list of items (None: torch's way), and
    `num_workers` processes fetch items ahead."""

    dataset: MapDataset
    collate: Collate | None = None
    num_workers: int = 0
    shuffle: bool = True


def load_batches(
    data: Data, order: DataOrder, plan: BatchPlan, *, rank: int, first_step: int, device: torch.device
) -> Iterator[Any]:
    """Collated micro-batches on `device`, from step `first_step` (counted from 0) on, without end.

    With `num_workers` 0 a sample is fetched when it is asked for, in this process. Workers fetch ahead; what
    they draw at random depends on seed and position alone.
    """
    loader = DataLoader(
        _OrderedDataset(data.dataset, order),
        batch_sampler=_Positions(plan, rank, first_step),
        collate_fn=data.collate,
        num_workers=data.num_workers,
        pin_memory=device.type == "cuda",
        # A generator of its own: the default one is part of the state that is resumed.
        generator=torch.Generator(),
    )
    return (to_device(batch, device) for batch in loader)


def to_device(batch: Any, device: torch.device) -> Any:
    """The same structure of mappings, lists and tuples with its tensors on `device`; objects whose class knows how to
    get there, such as a tokenizer's BatchEncoding or a PackedSequence, do so by themselves."""
    if isinstance(batch, torch.Tensor):
        return batch.to(device, non_blocking=True)
    if callable(getattr(type(batch), "to", None)):  # an attribute of the batch's own may be one of its fields
        return batch.to(device)
    if isinstance(batch, MutableMapping):  # as DataLoader does, which keeps the class when it pins memory
        moved = copy.copy(batch)
        for key, value in batch.items():
            moved[key] = to_device(value, device)
        return moved
    if isinstance(batch, Mapping):
        return {key: to_device(value, device) for key, value in batch.items()}
    if isinstance(batch, tuple) and hasattr(batch, "_fields"):
        return type(batch)(*(to_device(value, device) for value in batch))
    if isinstance(batch, list | tuple):
        return type(batch)(to_device(value, device) for value in batch)
    return batch


class _OrderedDataset(Dataset[Any]):
    """Samples by their position in the run."""

    def __init__(self, dataset: MapDataset, order: DataOrder) -> None:
        self._dataset = dataset
        self._order = order

    def __getitem__(self, position: int) -> Any:
        return self.__getitems__([position])[0]

    def __getitems__(self, positions: Sequence[int]) -> list[Any]:
        samples = self._order.samples(positions).tolist()
        if get_worker_info() is None:
            return [self._dataset[sample] for sample in samples]
        return [self._seeded(position, sample) for position, sample in zip(positions, samples, strict=True)]

    def _seeded(self, position: int, sample: int) -> Any:
        random_state.seed_everything(self._order.seed, step=position)
        return self._dataset[sample]


class _Positions:
    """The positions of each micro-batch of a rank, without end."""

    def __init__(self, plan: BatchPlan, rank: int, first_step: int) -> None:
        self._plan = plan
        self._rank = rank
        self._first_step = first_step

    def __iter__(self) -> Iterator[list[int]]:
        step = self._first_step
        while True:
            for micro_batch in self._plan.micro_batches(self._rank, step):
                yield list(micro_batch.positions)
            step += 1
