"""One rank's share of the data of a run."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch

from spottrain.data.audit import AuditHeader, AuditRecord, AuditWriter
from spottrain.data.batch import BatchPlan
from spottrain.data.batches import Batches
from spottrain.data.loader import Data, MicroBatches, load_batches
from spottrain.data.mixtures.dataset import Mixture
from spottrain.data.mixtures.mixture_order import MixtureOrder
from spottrain.data.order import ENDLESS, DataOrder
from spottrain.data.script_order import OrderPlace, ScriptOrder
from spottrain.data.shards.dataset import Shards
from spottrain.data.shards.fetch_ahead import FetchAhead, Upcoming, check_room
from spottrain.data.shards.shard_order import ShardOrder
from spottrain.data.streams.marks import StreamMarks
from spottrain.data.streams.stream_order import StreamOrder, StreamPlaces


@dataclass(slots=True, kw_only=True)
class RankData:
    """What one rank reads in one generation: which samples at which step, and how.

    Attributes:
        data: The data set, and how it is read.
        order: Which sample is at which position.
        plan: How ranks share a batch.
        rank: Number of this rank.
        generation: Number of the generation.
        attempt: Id of this start of the generation.
        local_world_size: Ranks of this node.
        tokens_per_sample: For the reported throughput.
        schedule_interval: "step" or "epoch": after which of them the schedule of learning rates steps.
        open_audit: Opens the file in which the samples are recorded. None: they are not.
        place: Where the run is in the script's own order; None if it has none.
        marks: Where this rank's streams can be read on from; None if the data have no streams.
        batches: Which positions each step uses; of the loop, once it has begun.
    """

    data: Data
    order: DataOrder
    plan: BatchPlan
    rank: int
    generation: int
    attempt: str
    local_world_size: int = 1
    tokens_per_sample: int | None = None
    schedule_interval: str = "step"
    open_audit: Callable[[AuditHeader], AuditWriter] | None = None
    place: OrderPlace | None = field(init=False)
    marks: StreamMarks | None = field(init=False)
    batches: Batches = field(init=False)
    _audit: AuditWriter | None = field(init=False, default=None)
    _ahead: tuple[FetchAhead, ...] = field(init=False, default=())

    def __post_init__(self) -> None:
        self.batches = Batches(self.order, self.plan.global_batch)
        self.place = OrderPlace(self.order, lambda: self.batches) if isinstance(self.order, ScriptOrder) else None
        self.marks = None
        if (streams := _streams_of(self.order)) is not None:
            share = self.plan.share(self.rank, range(self.plan.global_batch))
            self.marks = StreamMarks(streams, streams.streams_of(share))

    @property
    def header(self) -> AuditHeader:
        """What determines the order of the samples."""
        return AuditHeader(
            seed=self.order.seed,
            shuffle=self.data.shuffle,
            num_samples=self.order.num_samples,
            global_batch=self.plan.global_batch,
            order=self.order.kind,
            loop="epochs" if self.batches.by_epoch else "steps",
        )

    def begin(self, length: int, *, by_epoch: bool, last_step: int | None = None) -> dict[str, Any]:
        """Begin a loop.

        Args:
            length: Steps of the run, or its epochs.
            by_epoch: Whether each epoch ends with a batch of what is left.
            last_step: Steps after which a run of epochs ends, also inside one.

        Returns:
            What must not differ between this run and the one that saved.

        Raises:
            ValueError: The data have no epochs, their ends do not fit batch.multipleOf, or the folder for audits
                can't be made.
        """
        if self.order.num_samples == ENDLESS and (by_epoch or self.schedule_interval == "epoch"):
            asked = "training.epochs" if by_epoch else 'scheduler_interval="epoch"'
            raise ValueError(
                f"the data ({self.order.kind}) have no epochs, as each of their parts begins again when it ends, and "
                f'the script has {asked}; use training.steps, with scheduler_interval="step"'
            )
        self.batches = Batches(
            self.order, self.plan.global_batch, by_epoch=by_epoch, length=length, last_step=last_step
        )
        if by_epoch:
            steps, _ = self.batches.epoch_of(0)
            self.plan.share(self.rank, self.batches.at(steps[-1]).positions)
        self._audit = self.open_audit(self.header) if self.open_audit is not None else None
        return self.header.model_dump()

    def tokens(self, step: int) -> int | None:
        """Tokens of a completed step, counted from 1. None if the script does not say how many a sample has."""
        return self.tokens_per_sample * self.num_samples(step) if self.tokens_per_sample else None

    def num_samples(self, step: int) -> int:
        """Samples of a completed step, counted from 1."""
        return len(self.batches.at(step - 1).positions)

    def facts(self, step: int) -> dict[str, Any]:
        """What this rank reports of its data after a step, counted from 1: fields of Progress."""
        epoch, dataset = self.batches.at(step - 1).epoch, self.data.dataset
        sources = dataset.sources if isinstance(dataset, Mixture) else [dataset]
        shards = [each for each in sources if isinstance(each, Shards)]
        fetched = [each.cache.fetched.totals() for each in shards]
        used = self.batches.at(step - 1).positions.stop - epoch.positions.start
        return {
            "epoch": epoch.number + used / len(epoch.positions) if self.order.num_samples != ENDLESS else None,
            "undecodable_samples": sum(len(each.undecodable) for each in shards),
            "fetched_bytes": sum(each.all for each in fetched),
            "late_bytes": sum(each.late for each in fetched),
        }

    def steps_schedule(self, step: int) -> bool:
        """Whether the schedule steps after this step, counted from 0."""
        return self.schedule_interval == "step" or self.batches.at(step).ends_epoch

    def load(self, *, first_step: int, device: torch.device) -> MicroBatches:
        """This rank's micro-batches from step `first_step` (counted from 0) on, up to the end of the run."""
        found = load_batches(
            self.data,
            self.batches,
            self.plan,
            rank=self.rank,
            first_step=first_step,
            device=device,
            marks=self.marks,
        )
        self._ahead = self._fetch_ahead(first_step)
        found.on_close = self._close_ahead
        return found

    def _fetch_ahead(self, first_step: int) -> tuple[FetchAhead, ...]:
        """Let one rank of each node fetch shards ahead, for all of them. Raises ValueError for too small a cache."""
        first = self.rank - self.rank % self.local_world_size
        batch, last = range(self.plan.global_batch), min(first + self.local_world_size, self.plan.world_size) - 1
        share = range(self.plan.share(first, batch).start, self.plan.share(last, batch).stop)
        shards = list(self._shards(share))
        if self.rank != first or self.batches.is_over(first_step):
            return ()
        return tuple(FetchAhead(each, upcoming, first_step) for each, upcoming in shards)

    def _shards(self, share: range) -> Iterator[tuple[Shards, Upcoming]]:
        """The data sets in shards, and which shards a node needs whose part of a batch is `share`."""
        dataset, order, batches = self.data.dataset, self.order, self.batches
        if isinstance(dataset, Shards) and isinstance(order, ShardOrder):
            check_room(dataset, order, share)
            yield (
                dataset,
                lambda step: order.upcoming(batches.at(step).positions.start, share, by_epoch=batches.by_epoch),
            )
        if isinstance(dataset, Mixture) and isinstance(order, MixtureOrder):
            for number, (part, source) in enumerate(zip(dataset.sources, order.sources, strict=True)):
                if isinstance(part, Shards) and isinstance(source.order, ShardOrder):
                    check_room(part, source.order, source.order.whole_batch)
                    yield part, partial(order.upcoming, number)

    def _close_ahead(self) -> None:
        for each in self._ahead:
            each.close()

    def record(self, step: int) -> None:
        """Record which samples this rank used for a completed step, counted from 1."""
        if self.place is not None:
            self.place.step = step
        if self.marks is not None:
            self.marks.completed(step)
        for each in self._ahead:
            each.at(step)
        if self._audit is None:
            return
        positions = self.plan.share(self.rank, self.batches.at(step - 1).positions)
        record = AuditRecord(
            at=time.time(),
            generation=self.generation,
            attempt=self.attempt,
            step=step,
            rank=self.rank,
            world=self.plan.world_size,
            positions=tuple(positions),
            samples=tuple(self.order.samples(positions).tolist()),
        )
        self._audit.write(record)


def _streams_of(order: DataOrder) -> StreamPlaces | None:
    if isinstance(order, MixtureOrder):
        return order.streams
    return order if isinstance(order, StreamOrder) else None
