"""Data of the script's own, or none: the library knows the steps, and how ranks may share a batch."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch

from spottrain.data.batch import BatchPlan, FetchedBatch
from spottrain.data.batches import Batches
from spottrain.data.order import ENDLESS, Permutation


class NoBatches:
    """Stands where the micro-batches of a rank do."""

    def __iter__(self) -> NoBatches:
        return self

    def __next__(self) -> FetchedBatch:
        raise StopIteration

    def pop_wait(self) -> float:
        return 0.0

    def close(self) -> None:
        """There is nothing to close."""


@dataclass(slots=True, kw_only=True)
class OwnData:
    """What a loop asks of `RankData`, for a script that reads its data itself.

    Attributes:
        plan: How ranks share a batch, for scripts that share theirs so.
        order: Stands for the script's, which nobody knows.
        batches: The steps of the loop, once it has begun.
    """

    plan: BatchPlan
    order: Permutation
    batches: Batches = field(init=False)

    @classmethod
    def of(cls, plan: BatchPlan, *, seed: int, steps_per_epoch: int | None = None) -> OwnData:
        num_samples = plan.global_batch * steps_per_epoch if steps_per_epoch else ENDLESS
        return cls(plan=plan, order=Permutation(num_samples=num_samples, seed=seed, shuffle=False))

    @property
    def place(self) -> None:
        """Nobody knows where the script is in its data."""

    @property
    def marks(self) -> None:
        """It has no streams of the library's."""

    def __post_init__(self) -> None:
        self.batches = Batches(self.order, self.plan.global_batch)

    def begin(self, length: int, *, by_epoch: bool, last_step: int | None = None) -> dict[str, Any]:
        """Begin a loop, as `RankData.begin`. Returns what must not differ between this run and the one that saved."""
        self.batches = Batches(
            self.order, self.plan.global_batch, by_epoch=by_epoch, length=length, last_step=last_step
        )
        return {"seed": self.order.seed, **({"steps_per_epoch": self._steps_per_epoch} if by_epoch else {})}

    @property
    def _steps_per_epoch(self) -> int:
        return self.order.num_samples // self.plan.global_batch

    def tokens(self, step: int) -> int | None:
        return None

    def num_samples(self, step: int) -> int | None:
        return None

    def facts(self, step: int) -> dict[str, Any]:
        return {}

    def steps_schedule(self, step: int) -> bool:
        return False

    def load(self, *, first_step: int, device: torch.device) -> NoBatches:
        return NoBatches()

    def record(self, step: int) -> None:
        """Nobody knows which samples the script has used."""
