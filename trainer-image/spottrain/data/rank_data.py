"""One rank's share of the data of a run."""

from __future__ import annotations

import time
from dataclasses import dataclass

import torch

from spottrain.data.audit import AuditRecord, AuditWriter
from spottrain.data.batch import BatchPlan, MicroBatch
from spottrain.data.loader import Batches, Data, load_batches
from spottrain.data.order import DataOrder


@dataclass(frozen=True, slots=True, kw_only=True)
class RankData:
    """What one rank reads in one generation: which samples, at which step, how they are fetched, and the record of
    it."""

    data: Data
    order: DataOrder
    plan: BatchPlan
    rank: int
    generation: int
    tokens_per_sample: int | None = None
    audit: AuditWriter | None = None
    """None: which samples were used is not recorded."""

    @property
    def tokens_per_step(self) -> int | None:
        """Tokens of the global batch; None if the script doesn't say how many a sample has."""
        return self.tokens_per_sample * self.plan.global_batch if self.tokens_per_sample else None

    def batches(self, *, first_step: int, device: torch.device) -> Batches:
        """This rank's micro-batches from step `first_step` (counted from 0) on."""
        return load_batches(self.data, self.order, self.plan, rank=self.rank, first_step=first_step, device=device)

    def micro_batches(self, step: int) -> list[MicroBatch]:
        """What this rank runs in a step (counted from 0), in this order."""
        return self.plan.micro_batches(self.rank, step)

    def record(self, step: int) -> None:
        """Write to the audit which samples this rank used for a completed step, counted from 1."""
        if self.audit is None:
            return
        positions = self.plan.share(self.rank, step - 1)
        record = AuditRecord(
            at=time.time(),
            generation=self.generation,
            step=step,
            rank=self.rank,
            world=self.plan.world_size,
            positions=tuple(positions),
            samples=tuple(self.order.samples(positions).tolist()),
        )
        self.audit.write(record)
