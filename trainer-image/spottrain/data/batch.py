"""How the ranks share the samples of one optimizer step.

The global batch defines a step; the world size only decides how it is computed. Rank r of W takes a contiguous part
of the batch's G positions, in micro-batches of at most `micro_batch` samples. All ranks run the same number of
micro-batches, so that their collectives match; a rank with fewer samples runs empty ones. Losses are weighted so that
the gradient is the mean over the G samples, even if W does not divide G.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple


@dataclass(frozen=True, slots=True, kw_only=True)
class MicroBatch:
    """The positions of one forward and backward pass on one rank.

    A rank that has no samples left computes a sample of another rank with weight zero, because it has to take part in
    the collectives of forward and backward.

    Attributes:
        positions: Positions of its samples in the order of the whole run.
        num_samples: Samples that count; 0 if the weight is zero.
        loss_weight: Factor of the mean loss over the micro-batch, for engines that average gradients over the ranks.
        is_last: Whether it is the last one of the step on this rank.
    """

    positions: range
    num_samples: int
    loss_weight: float
    is_last: bool


class FetchedBatch(NamedTuple):
    """A micro-batch with its data, as `collate` made them. Pinning and moving to a device keep named tuples."""

    micro_batch: MicroBatch
    data: Any


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchPlan:
    """How ranks share the global batch. Step s (from 0) uses the positions s * G up to (s + 1) * G.

    Attributes:
        global_batch: Samples of one optimizer step (G).
        micro_batch: Largest number of samples of one forward pass.
        world_size: Number of ranks.

    Example:
        >>> from spottrain.data.batch import BatchPlan
        >>> plan = BatchPlan(global_batch=10, micro_batch=2, world_size=3)
        >>> [len(plan.share(rank)) for rank in range(3)], plan.num_micro_batches
        ([3, 3, 4], 2)
    """

    global_batch: int
    micro_batch: int
    world_size: int

    def __post_init__(self) -> None:
        if min(self.global_batch, self.micro_batch, self.world_size) < 1:
            raise ValueError("batch.global, batch.micro and the world size have to be at least 1")

    @property
    def num_micro_batches(self) -> int:
        """Micro-batches that every rank runs in a step."""
        largest_share = -(-self.global_batch // self.world_size)
        return -(-largest_share // self.micro_batch)

    def share(self, rank: int, step: int = 0) -> range:
        """The positions that a rank computes in a step. Shares differ by at most one sample."""
        begin = step * self.global_batch
        return range(
            begin + rank * self.global_batch // self.world_size,
            begin + (rank + 1) * self.global_batch // self.world_size,
        )

    def micro_batches(self, rank: int, step: int) -> list[MicroBatch]:
        """The micro-batches that a rank runs in a step, in order."""
        share = self.share(rank, step)
        return [self._micro_batch(share, index, step) for index in range(self.num_micro_batches)]

    def _micro_batch(self, share: range, index: int, step: int) -> MicroBatch:
        # Of about the same size: one sample alone has no variance, which batch norm asks for.
        begin, end = (i * len(share) // self.num_micro_batches for i in (index, index + 1))
        positions = share[begin:end]
        first = step * self.global_batch
        return MicroBatch(
            positions=positions or range(first, first + 1),
            num_samples=len(positions),
            loss_weight=len(positions) * self.world_size / self.global_batch,
            is_last=index == self.num_micro_batches - 1,
        )
