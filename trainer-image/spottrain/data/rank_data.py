"""One rank's share of the data of a run."""

from __future__ import annotations

import time
from dataclasses import dataclass

import torch

from spottrain.data.audit import AuditRecord, AuditWriter
from spottrain.data.batch import BatchPlan
from spottrain.data.loader import Data, MicroBatches, load_batches
from spottrain.data.order import DataOrder


@dataclass(frozen=True, slots=True, kw_only=True)
class RankData:
    """What one rank reads in one generation: which samples at which step, and how.

    Attributes:
        data: The data set, and how it is read.
        order: Which sample is at which position.
        plan: How ranks share the batch.
        rank: Number of this rank.
        generation: Number of the generation.
        attempt: Id of this start of the generation.
        tokens_per_sample: For the reported throughput.
        audit: Where the samples are recorded. None: nowhere.
    """

    data: Data
    order: DataOrder
    plan: BatchPlan
    rank: int
    generation: int
    attempt: str
    tokens_per_sample: int | None = None
    audit: AuditWriter | None = None

    @property
    def tokens_per_step(self) -> int | None:
        """Tokens of the global batch. None if the script does not say how many a sample has."""
        return self.tokens_per_sample * self.plan.global_batch if self.tokens_per_sample else None

    def batches(self, *, first_step: int, device: torch.device) -> MicroBatches:
        """This rank's micro-batches from step `first_step` (counted from 0) on."""
        return load_batches(self.data, self.order, self.plan, rank=self.rank, first_step=first_step, device=device)

    def record(self, step: int) -> None:
        """Record which samples this rank used for a completed step, counted from 1."""
        if self.audit is None:
            return
        positions = self.plan.share(self.rank, step - 1)
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
        self.audit.write(record)
