"""The batches of a rank, in the run's order."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from io import BytesIO
from itertools import chain, islice
from multiprocessing.reduction import ForkingPickler
from statistics import median
from typing import Any, NamedTuple

import numpy as np
import torch
from torch.utils.data import DataLoader, Dataset, default_collate, get_worker_info

from spottrain.data import random_state
from spottrain.data.batch import BatchPlan, FetchedBatch, MicroBatch
from spottrain.data.batches import Batches
from spottrain.data.by_index import ByIndex
from spottrain.data.hand_over import packed
from spottrain.data.items import Items, MapDataset, name_of
from spottrain.data.mixtures.dataset import Mixture
from spottrain.data.mixtures.reader import MixtureReader
from spottrain.data.streams.cursor import Mark
from spottrain.data.streams.dataset import Streams
from spottrain.data.streams.marks import StreamMarks
from spottrain.data.streams.reader import StreamReader
from spottrain.data.to_device import to_device
from spottrain.data.workers import FromWorkers, StartWorker

logger = logging.getLogger(__name__)

Collate = Callable[[list[Any]], Any]
Fetch = Callable[..., Iterator["_Fetched"]]

# By default, a worker fetches data ahead if the first micro-batches, which the rank fetches itself, take longer than
# this. To pass a micro-batch between processes takes a fraction of a millisecond.
NUM_MEASURED = 3
CHEAP_SECONDS = 0.002
# A worker that was started by default, and that delivers nothing for so long, hangs: some libraries break after a
# fork.
FIRST_BATCH_SECONDS = 60.0
# Steps that are looked up in the order at once, and their samples, about. It takes a few milliseconds.
_LOOK_UP_STEPS = 64
_LOOK_UP_SAMPLES = 4096
_OF_WORKERS = frozenset({"prefetch_factor", "worker_init_fn", "multiprocessing_context", "timeout"})
OPTIONS = _OF_WORKERS | {"pin_memory"}
"""Arguments of torch's DataLoader that a script may give."""


@dataclass(frozen=True, slots=True)
class Data:
    """A data set, and how it is read.

    Attributes:
        dataset: The training data: items by index, streams, or a mixture of both.
        collate: Makes a batch from a list of items. None: as torch's DataLoader does.
        num_workers: Processes that fetch items ahead. None: one process, if items are slow to fetch.
        shuffle: Whether the order is random.
        loader: Further arguments of torch's DataLoader, of `OPTIONS`.
    """

    dataset: MapDataset | Streams
    collate: Collate | None = None
    num_workers: int | None = None
    shuffle: bool = True
    loader: Mapping[str, Any] = field(default_factory=dict)

    def check(self) -> None:
        """Check that the values fit together.

        Raises:
            ValueError: They don't. The sentence is torch's, if it has one.
        """
        num_workers = 1 if self.num_workers is None else self.num_workers
        if not isinstance(num_workers, int):
            raise ValueError(f"num_workers is {num_workers!r}; pass a whole number, or None")
        has_streams = isinstance(self.dataset, Streams) or (
            isinstance(self.dataset, Mixture) and self.dataset.has_streams
        )
        if has_streams and num_workers > 1:
            raise ValueError(
                f"num_workers is {num_workers}, and one process reads a rank's streams, in their order; pass 1, or 0 "
                "if the streams have workers of their own"
            )
        if self.loader.get("timeout") and not num_workers:
            raise ValueError("loader: timeout is for workers; set num_workers to 1 or more, or leave out timeout")
        if self.loader.get("prefetch_factor") == 0:
            raise ValueError("loader: prefetch_factor is 0, and a worker fetches one batch ahead at least; raise it")
        _data_loader(self, [], [], num_workers=num_workers, pins_memory=False)


class MicroBatches(Iterator[FetchedBatch]):
    """A rank's collated micro-batches, on its device.

    It also measures how long the rank waited for them.
    """

    def __init__(
        self,
        fetched: Generator[_Fetched],
        device: torch.device,
        now: Callable[[], float],
        marks: StreamMarks | None = None,
    ) -> None:
        self._fetched = fetched
        self._marks = marks
        self.on_close: Callable[[], None] = lambda: None
        """Ends what else fetches."""
        self._device = device
        self._now = now
        self._waited = 0.0

    def __next__(self) -> FetchedBatch:
        started = self._now()
        batch, marks = next(self._fetched)
        self._waited += self._now() - started
        if self._marks is not None:
            self._marks.add(marks)
        return batch._replace(data=to_device(batch.data, self._device))

    def pop_wait(self) -> float:
        """How many seconds the rank has waited since the last call."""
        waited, self._waited = self._waited, 0.0
        return waited

    def close(self) -> None:
        """End the workers."""
        self._fetched.close()
        self.on_close()


def load_batches(
    data: Data,
    batches: Batches,
    plan: BatchPlan,
    *,
    rank: int,
    first_step: int,
    device: torch.device,
    now: Callable[[], float] = time.monotonic,
    marks: StreamMarks | None = None,
) -> MicroBatches:
    """A rank's micro-batches, up to the end of the run.

    What a data set draws at random depends on seed and position alone, not on the process that fetches the item.

    Args:
        data: The data set, and how it is read.
        batches: Which positions each step uses.
        plan: How ranks share a batch.
        rank: Number of this rank.
        first_step: The first step, counted from 0.
        device: Where the batches go.
        now: Clock, in seconds.
        marks: Where streams can be read on from; kept up to date. None: the data have no streams.

    Returns:
        The micro-batches. Close them to end the workers.
    """
    pins_memory = data.loader.get("pin_memory", device.type == "cuda")
    fetching = _MicroBatches(data, _items(data.dataset, batches.order.seed, marks), packs=not pins_memory)

    def fetch(num_workers: int, *, after: int = 0) -> Iterator[_Fetched]:
        loader = _data_loader(
            data,
            fetching,
            islice(_planned(batches, plan, rank, first_step), after, None),
            num_workers=num_workers,
            pins_memory=pins_memory,
        )
        try:
            fetched = iter(loader)
        except Exception as error:
            if "multiprocessing_context" not in data.loader:
                raise
            raise ValueError(
                f"the data set can't be passed to a worker: {error}. Define it at the top of a module, without what "
                "can't be pickled, or leave out multiprocessing_context of loader: workers are forked then"
            ) from error
        return FromWorkers(fetched, waits_after_first="timeout" not in data.loader) if num_workers else fetched

    return MicroBatches(_fetched(data.num_workers, fetch, now), device, now, marks)


def _fetched(num_workers: int | None, fetch: Fetch, now: Callable[[], float]) -> Generator[_Fetched]:
    if num_workers is not None:
        yield from fetch(num_workers)
        return
    own, seconds = fetch(0), []
    for _ in range(NUM_MEASURED):
        started = now()
        try:
            batch = next(own)
        except StopIteration:  # the run is over
            return
        seconds.append(now() - started)
        yield batch
    yield from own if median(seconds) <= CHEAP_SECONDS else _fetched_ahead(fetch, after=NUM_MEASURED, like=batch)


def _fetched_ahead(fetch: Fetch, *, after: int, like: _Fetched) -> Iterator[_Fetched]:
    """Micro-batches from a worker.

    They come from this process if the data set cannot be read from another one (it has tensors on a GPU, or uses a
    client that breaks after a fork), or if a batch such as `like` cannot be pickled.
    """
    try:
        # Otherwise a worker would drop the batch, and the rank would wait for it.
        _PicklingTrial(BytesIO()).dump(like)
        ahead = fetch(1, after=after)
        return chain([next(ahead)], ahead)
    except Exception as error:
        first_line = str(error).strip().partition("\n")[0]
        logger.warning(
            "No worker fetches data ahead, because a worker could not read them: %s: %s",
            type(error).__name__,
            first_line,
        )
        return fetch(0, after=after)


class _PicklingTrial(ForkingPickler):
    """Pickles all but tensors, which workers pass in shared memory."""

    def reducer_override(self, value: Any) -> Any:
        return (int, ()) if isinstance(value, torch.Tensor) else NotImplemented


def _data_loader(
    data: Data, fetched: Any, planned: Iterable[_Planned], *, num_workers: int, pins_memory: bool
) -> DataLoader[Any]:
    options = dict(data.loader)
    if data.num_workers is None and not num_workers:  # they are for the worker that may follow
        options = {name: value for name, value in options.items() if name not in _OF_WORKERS}
    if data.num_workers is None and num_workers:
        options = {"timeout": FIRST_BATCH_SECONDS, **options}
    if num_workers:
        # Other start methods run the script's main module again, which is written for a rank.
        options.setdefault("multiprocessing_context", "fork")
        options["worker_init_fn"] = StartWorker(options.get("worker_init_fn"))
    return DataLoader(
        fetched,
        sampler=planned,
        batch_size=None,
        collate_fn=_unchanged,
        num_workers=num_workers,
        # A generator of its own, because the default one is part of the state that is resumed.
        generator=torch.Generator(),
        **{"pin_memory": pins_memory, **options},
    )


class _Planned(NamedTuple):
    """A micro-batch, and the indices of its samples."""

    micro_batch: MicroBatch
    samples: list[int]


class _Fetched(NamedTuple):
    """A micro-batch with its data, and where streams can be read on from."""

    batch: FetchedBatch
    marks: dict[int, list[Mark]]


def _items(dataset: MapDataset | Streams, seed: int, marks: StreamMarks | None) -> Items:
    if marks is None:
        assert not isinstance(dataset, Streams)
        return ByIndex(dataset, seed)
    if isinstance(dataset, Mixture):
        return MixtureReader(dataset, marks, seed)
    assert isinstance(dataset, Streams)
    return StreamReader(dataset.make_stream, marks)


class _MicroBatches(Dataset[Any]):
    """Fetches and collates the samples of micro-batches."""

    def __init__(self, data: Data, items: Items, *, packs: bool) -> None:
        """`packs` says whether workers pack what they fetch: torch can't pin that."""
        self._items = items
        self._own_collate = data.collate
        self._name_of = partial(name_of, data.dataset)
        self._packs = packs

    def __getitem__(self, planned: _Planned) -> Any:
        """A `_Fetched`, which a worker may have packed."""
        if get_worker_info() is not None:
            return packed(self._fetch(planned)) if self._packs else self._fetch(planned)
        with random_state.host_untouched():
            return self._fetch(planned)

    def _fetch(self, planned: _Planned) -> _Fetched:
        items = self._items.items(planned.micro_batch, planned.samples)
        data = self._own_collate(items) if self._own_collate else self._collated(items, planned.samples)
        return _Fetched(FetchedBatch(planned.micro_batch, data), self._items.pop_marks())

    def _collated(self, items: list[Any], samples: Sequence[int]) -> Any:
        """A batch as torch makes it. Raises ValueError, which names the samples that are not alike."""
        try:
            return default_collate(items)
        except (RuntimeError, TypeError, KeyError, ValueError, AttributeError) as error:
            first_line = str(error).strip().partition("\n")[0]
            odd = next((number for number, item in enumerate(items) if not _are_alike(items[0], item)), 0)
            names = sorted({self._name_of(samples[0]), self._name_of(samples[odd])})
            raise ValueError(
                f"{' and '.join(names)} can't be in one batch: {first_line}. Let the data set make tensors of one "
                "shape, or pass collate, a function of a list of items that pads them"
            ) from error


def _are_alike(first: Any, other: Any) -> bool:
    try:
        default_collate([first, other])
    except (RuntimeError, TypeError, KeyError, ValueError, AttributeError):
        return False
    return True


def _planned(batches: Batches, plan: BatchPlan, rank: int, first_step: int) -> Iterator[_Planned]:
    """A rank's micro-batches from `first_step` on. The rank's own process looks up samples; workers need no order.

    Samples of several steps are looked up at once, which takes a small part of the time. The script's own order is
    asked for no epoch before its time.
    """
    share = -(-plan.global_batch // plan.world_size)
    num_steps = min(_LOOK_UP_STEPS, max(1, _LOOK_UP_SAMPLES // share)) if batches.order.is_regular else 1
    steps = batches.steps_from(first_step)
    while chunk := list(islice(steps, num_steps)):
        planned = [each for step in chunk for each in plan.micro_batches(rank, batches.at(step).positions)]
        positions = np.concatenate([np.arange(each.positions.start, each.positions.stop) for each in planned])
        samples = iter(batches.order.samples(positions).tolist())
        for micro_batch in planned:
            yield _Planned(micro_batch, list(islice(samples, len(micro_batch.positions))))


def _unchanged(batch: Any) -> Any:
    return batch
