"""One optimizer step, as the user's script sees it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import islice
from typing import Any

import torch

from spottrain.data.batch import BatchPlan, FetchedBatch, MicroBatch
from spottrain.engines.engine import Engine
from spottrain.loop.whole_batch import gather
from spottrain.world.failures import UserError


class LossMeter:
    """The mean loss of a step, read without making the accelerator wait.

    On the CPU, a step's loss is known when the step ends. On an accelerator, it is copied in the background and read
    one step later.
    """

    def __init__(self) -> None:
        self._sum: torch.Tensor | float | None = None
        self._copying: tuple[torch.Tensor, torch.cuda.Event] | None = None

    def add(self, share: torch.Tensor | float) -> None:
        """Add a micro-batch's part of this rank's share of the mean."""
        self._sum = share if self._sum is None else self._sum + share

    def value(self) -> float:
        """This rank's share for the step under way; waits for the accelerator."""
        return float(self._sum) if self._sum is not None else 0.0

    def close_step(self) -> float | None:
        """This rank's share for the newest step with a known loss. None before the first."""
        total, self._sum = self._sum, None
        if not isinstance(total, torch.Tensor) or not total.is_cuda:
            return float(total) if total is not None else None
        before = self._copying
        copy = torch.empty_like(total, device="cpu", pin_memory=True).copy_(total, non_blocking=True)
        event = torch.cuda.Event()  # type: ignore[no-untyped-call]
        event.record()
        self._copying = copy, event
        if before is None:
            return None
        before[1].synchronize()
        return float(before[0])


class Step:
    """One optimizer step.

    Run every micro-batch forward and `backward`, then `update` once. `Training.steps` yields it; see
    `Session.prepare` for an example.

    Attributes:
        number: Number of the step in the whole run, from 1: `if step.number % 500 == 0` is true every 500 steps.
    """

    def __init__(
        self,
        number: int,
        *,
        rank: int,
        plan: BatchPlan,
        batches: Iterator[FetchedBatch],
        engine: Engine,
        meter: LossMeter,
        begin: Callable[[int], None],
        update: Callable[[], None],
    ) -> None:
        """`begin` is called with the number of each micro-batch, before it."""
        self.number = number
        self._rank = rank
        self._plan = plan
        self._batches = batches
        self._engine = engine
        self._meter = meter
        self._begin = begin
        self._update = update
        self._current: MicroBatch | None = None
        self._num_done = 0
        self._has_begun = False
        self._is_of_whole_batch = False  # whether the loss of the micro-batch under way is
        self.updated = False

    def micro_batches(self) -> Iterator[Any]:
        """This rank's micro-batches of the step.

        Yields:
            What `collate` made, on the rank's device: tensors of shape `(micro, ...)`. The last may be smaller.

        Raises:
            Drained: The ranks have agreed to stop. Do not catch it: it ends the script with exit code 0.
            RuntimeError: `backward` was not called for the micro-batch before, or this is a second pass.
        """
        if self._has_begun:
            raise RuntimeError(
                "step.micro_batches() was used twice for one step, and would read the samples of the next one; go "
                "through it once, and compute all that needs a micro-batch before its step.backward(loss)"
            )
        self._has_begun = True
        for index, (micro_batch, data) in enumerate(self.fetch()):
            self._begin(index)
            self._engine.begin_micro_batch(is_last=micro_batch.is_last)
            self._current = micro_batch
            yield data
            if self._current is not None:
                raise RuntimeError("step.backward(loss) was not called for a micro-batch; call it for each of them")

    def fetch(self) -> Iterator[FetchedBatch]:
        """The same micro-batches for a different loop, which runs backward and updates in its own way."""
        return islice(self._batches, self._plan.num_micro_batches)

    def observe(self, share: torch.Tensor | float) -> None:
        """Add a micro-batch's part of this rank's share of the mean loss. `backward` calls it."""
        self._meter.add(share)

    def backward(self, loss: torch.Tensor) -> None:
        """Add the gradient of a micro-batch's loss.

        It is weighted so that the step's gradient is the mean over all samples of the global batch.

        Args:
            loss: The mean over the samples of the micro-batch, a scalar; over those of the global batch, if it was
                computed from what `gather` returned.

        Raises:
            RuntimeError: Called outside the loop over `micro_batches`, or twice for one of them.
        """
        if self._current is None:
            raise RuntimeError(
                "step.backward(loss) belongs inside `for batch in step.micro_batches()`, once for each"
            )
        weighted = loss if self._is_of_whole_batch else loss * self._current.loss_weight
        self._engine.backward(weighted)
        self.observe(weighted.detach() / self._plan.world_size)
        self._current, self._is_of_whole_batch = None, False
        self._num_done += 1

    def gather(self, rows: torch.Tensor) -> torch.Tensor:
        """Gather a tensor over the whole global batch, for a loss that compares its samples with each other.

        The rows come back in the order of the batch, at any number of ranks, with gradients for this rank's. A loss
        of gathered tensors is the mean over the global batch, and the same on all ranks: `backward` takes it so.

        Args:
            rows: A tensor of the micro-batch under way, with a row for each of its samples.

        Returns:
            A tensor with a row for each sample of the global batch.

        Raises:
            RuntimeError: Called outside the loop over `micro_batches`, or `rows` has another number of rows.
            UserError: The ranks have several micro-batches, of which each sees only a part of the batch.
        """
        if self._current is None:
            raise RuntimeError("step.gather belongs inside `for batch in step.micro_batches()`, before step.backward")
        plan, batch, number = self._plan, self._current.batch, len(self._current.positions)
        if plan.num_micro_batches > 1:
            share = -(-plan.global_batch // plan.world_size)
            raise UserError(
                f"step.gather needs all samples of a step at once, and each of the {plan.world_size} ranks has "
                f"{plan.num_micro_batches} micro-batches of up to {plan.micro_batch}. Set batch.micro to at least "
                f"{share}, or to {plan.global_batch}, so that any number of ranks can train"
            )
        if rows.shape[:1] != (number,):
            raise RuntimeError(
                f"step.gather got a tensor of shape {list(rows.shape)} in a micro-batch of {number} samples; pass "
                "one with a row for each of them"
            )
        self._is_of_whole_batch = True
        return gather(rows, [len(plan.share(rank, batch)) for rank in range(plan.world_size)], self._rank)

    def update(self) -> None:
        """Clip gradients, step the optimizer and the schedule, and clear gradients.

        Raises:
            Drained: The ranks have agreed to stop.
            RuntimeError: Called before all micro-batches are done, or twice.
        """
        if self.updated:
            raise RuntimeError("step.update() was called twice for one step")
        if self._num_done < self._plan.num_micro_batches:
            raise RuntimeError(
                f"step.update() was called after {self._num_done} of {self._plan.num_micro_batches} micro-batches; "
                "run all of step.micro_batches() first, as the other ranks do"
            )
        self._update()
        self.updated = True
