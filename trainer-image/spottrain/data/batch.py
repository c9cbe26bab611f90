"""How the ranks share the samples of one optimizer step.

The batch defines a step; the world size only decides how it is computed. Rank r of W takes a contiguous part of the
batch's positions, in micro-batches of at most `micro_batch` samples. All ranks run the same number of micro-batches
in every step, so that their collectives match; a rank with fewer samples runs empty ones. Losses are weighted so that
the gradient is the mean over the samples of the batch, even if W does not divide their number, and also if the batch
is smaller than the global batch, as at the end of an epoch. A script that needs micro-batches of a multiple of some
number gets whole units of it; their number differs by one between ranks.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

from spottrain_planner import batch_sizes


@dataclass(frozen=True, slots=True, kw_only=True)
class MicroBatch:
    """The positions of one forward and backward pass on one rank.

    A rank that has no samples left computes some again with weight zero, because it has to take part in the
    collectives of forward and backward. They are its own, or another rank's if it has none.

    Attributes:
        batch: Positions of the whole batch in the order of the run.
        positions: Positions of its samples.
        num_samples: Samples that count; 0 if the weight is zero.
        loss_weight: Factor of the mean loss over the micro-batch, for engines that average gradients over the ranks.
        is_last: Whether it is the last one of the step on this rank.
    """

    batch: range
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
    """How ranks share a batch.

    Attributes:
        global_batch: Samples of one optimizer step. No batch has more.
        micro_batch: Largest number of samples of one forward pass.
        world_size: Number of ranks.
        multiple_of: Every micro-batch has a multiple of this number of samples.

    Example:
        >>> from spottrain.data.batch import BatchPlan
        >>> plan = BatchPlan(global_batch=10, micro_batch=2, world_size=3)
        >>> [len(plan.share(rank, range(10))) for rank in range(3)], plan.num_micro_batches
        ([3, 3, 4], 2)
        >>> even = BatchPlan(global_batch=10, micro_batch=2, world_size=3, multiple_of=2)
        >>> [len(even.share(rank, range(10))) for rank in range(3)]
        [2, 4, 4]
    """

    global_batch: int
    micro_batch: int
    world_size: int
    multiple_of: int = 1

    def __post_init__(self) -> None:
        if min(self.global_batch, self.micro_batch, self.world_size) < 1:
            raise ValueError("batch.global, batch.micro and the world size have to be at least 1")
        if self.multiple_of < 1 or self.global_batch % self.multiple_of or self.micro_batch < self.multiple_of:
            raise ValueError(
                f"batch.global ({self.global_batch}) has to be a multiple of batch.multipleOf ({self.multiple_of}), "
                f"and batch.micro ({self.micro_batch}) at least as large"
            )

    @property
    def num_micro_batches(self) -> int:
        """Micro-batches that every rank runs in a step."""
        return batch_sizes.num_micro_batches(self.global_batch, self.micro_batch, self.world_size, self.multiple_of)

    def share(self, rank: int, batch: range) -> range:
        """The positions of a batch that a rank computes. Shares differ by at most `multiple_of` samples.

        Raises:
            ValueError: The batch has no multiple of `multiple_of` samples.
        """
        if len(batch) % self.multiple_of:
            raise ValueError(
                f"a batch has {len(batch)} samples, and batch.multipleOf is {self.multiple_of}; pass an order= whose "
                "epochs and batches have multiples of it, or loop over training.steps"
            )
        return _shifted(batch_sizes.part(len(batch), rank, self.world_size, self.multiple_of), batch.start)

    def micro_batches(self, rank: int, batch: range) -> list[MicroBatch]:
        """The micro-batches of a batch that a rank runs, in order."""
        share = self.share(rank, batch)
        return [self._micro_batch(share, index, batch) for index in range(self.num_micro_batches)]

    def _micro_batch(self, share: range, index: int, batch: range) -> MicroBatch:
        # Of about the same size: one sample alone has no variance, which batch norm asks for.
        part = batch_sizes.part(len(share), index, self.num_micro_batches, self.multiple_of)
        positions = _shifted(part, share.start)
        return MicroBatch(
            batch=batch,
            positions=positions or (share or batch)[: self.multiple_of],
            num_samples=len(positions),
            loss_weight=len(positions) * self.world_size / len(batch),
            is_last=index == self.num_micro_batches - 1,
        )


def _shifted(positions: range, by: int) -> range:
    return range(positions.start + by, positions.stop + by)
