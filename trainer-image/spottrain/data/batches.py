"""Which positions each step of a run uses.

An order says which sample is at which position. Here the positions are cut into the batches of the steps: batches run
on from one epoch into the next, or the last batch of an epoch holds what is left of it, or batches are the script's.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import count

from spottrain.data.order import DataOrder, Epoch


@dataclass(frozen=True, slots=True, kw_only=True)
class Batch:
    """The batch of one step.

    Attributes:
        positions: Its positions in the order of the run.
        epoch: The epoch of its last position.
        ends_epoch: Whether it holds the last sample of an epoch.
    """

    positions: range
    epoch: Epoch
    ends_epoch: bool


class Batches:
    """Cuts an order into batches.

    Attributes:
        order: Which sample is at which position.
        global_batch: Samples of a batch.
        by_epoch: Whether an epoch ends with a batch of what is left. Batches of the script's own always do.
        length: Epochs of the run, if `by_epoch`, and otherwise its steps. None: it has no end.
        last_step: Steps after which a run of epochs ends, also inside one. None: at the end of its last epoch.

    Example:
        >>> from spottrain.data.batches import Batches
        >>> from spottrain.data.order import Permutation
        >>> order = Permutation(num_samples=10)
        >>> [Batches(order, 4).at(step).positions for step in (1, 2)]
        [range(4, 8), range(8, 12)]
        >>> [Batches(order, 4, by_epoch=True).at(step).positions for step in (1, 2, 3)]
        [range(4, 8), range(8, 10), range(10, 14)]
    """

    def __init__(
        self,
        order: DataOrder,
        global_batch: int,
        *,
        by_epoch: bool = False,
        length: int | None = None,
        last_step: int | None = None,
    ) -> None:
        self.order = order
        self.global_batch = global_batch
        self.by_epoch = by_epoch
        self.length = length
        self.last_step = last_step
        self._starts = [(0, 0)]  # first step and first position of epochs, of which not all need be known
        self._newest: Epoch | None = None  # that was asked for

    def at(self, step: int) -> Batch:
        """The batch of a step, counted from 0."""
        if not self._is_cut:
            positions = range(step * self.global_batch, (step + 1) * self.global_batch)
            epoch = self._epoch_at(positions[-1])
            return Batch(
                positions=positions,
                epoch=epoch,
                ends_epoch=epoch.positions.start > positions.start or epoch.positions.stop == positions.stop,
            )
        first_step, epoch = self._find(step)
        positions = epoch.batch(step - first_step, self.global_batch)
        return Batch(positions=positions, epoch=epoch, ends_epoch=positions.stop == epoch.positions.stop)

    def steps_from(self, first: int) -> Iterator[int]:
        """The steps of the run from one on, counted from 0."""
        if not self.by_epoch:
            return iter(count(first) if self.length is None else range(first, self.length))
        return (step for steps, _ in self.epochs_from(first) for step in range(max(first, steps.start), steps.stop))

    def epochs_from(self, completed: int) -> Iterator[tuple[range, Epoch]]:
        """The epochs of a run by epochs, each with its steps, from that of the newest completed step on.

        None is asked for that lies after the end of the run.
        """
        steps, epoch = self.epoch_of(max(completed - 1, 0))
        while self.length is None or epoch.number < self.length:
            yield range(steps.start, self._at_most(steps.stop)), epoch
            if epoch.number + 1 == self.length or self._ends_at(steps.stop):
                return
            steps, epoch = self.epoch_of(steps.stop)

    def epoch_of(self, step: int) -> tuple[range, Epoch]:
        """The steps of the epoch to which a step belongs, and the epoch. For batches that don't run on."""
        first_step, epoch = self._find(step)
        return range(first_step, first_step + epoch.num_batches(self.global_batch)), epoch

    def is_over(self, completed: int) -> bool:
        """Whether the run ends after so many steps."""
        if self.length is None or not self.by_epoch:
            return self.length is not None and completed >= self.length
        if self._ends_at(completed):
            return True
        if completed == 0:
            return self.length == 0
        batch = self.at(completed - 1)
        return batch.epoch.number + batch.ends_epoch >= self.length

    def fingerprint(self, completed: int) -> int:
        """Of the order in the epoch of the step that follows; of the last one at the end of the run."""
        step = completed - 1 if completed > 0 and self.is_over(completed) else completed
        if self._is_cut:
            return self._find(step)[1].fingerprint
        return self._epoch_at((step + 1) * self.global_batch - 1).fingerprint

    @property
    def total_steps(self) -> int | None:
        """Steps of the run; None if the lengths of its epochs are not known yet."""
        if not self.by_epoch or self.length is None:
            return self.length
        if not self.order.is_regular:
            return None
        return self._at_most(self.length * self.order.epoch_at(0).num_batches(self.global_batch))

    def expected_steps(self, completed: int) -> int | None:
        """Steps of the run, if the epochs that follow are as long as the one under way."""
        if self.length is None or self.total_steps is not None:
            return self.total_steps
        steps, epoch = self.epoch_of(max(completed - 1, 0))
        return self._at_most(steps.stop + (self.length - epoch.number - 1) * len(steps))

    def start_at(self, step: int, position: int) -> None:
        """Note where an epoch starts, so that those before it need not be counted."""
        self._starts = [(step, position)]
        self._newest = None

    def _ends_at(self, steps: int) -> bool:
        return self.last_step is not None and steps >= self.last_step

    def _at_most(self, steps: int) -> int:
        return steps if self.last_step is None else min(steps, self.last_step)

    @property
    def _is_cut(self) -> bool:
        first = self._starts[0][1]
        return self.by_epoch or (not self.order.is_regular and self.order.epoch_at(first).ends is not None)

    def _epoch_at(self, position: int) -> Epoch:
        if self._newest is None or position not in self._newest.positions:
            self._newest = self.order.epoch_at(position)
        return self._newest

    def _find(self, step: int) -> tuple[int, Epoch]:
        """The first step of the epoch to which a step belongs, and the epoch."""
        first_step, position = self._starts[bisect_right(self._starts, step, key=lambda start: start[0]) - 1]
        while True:
            epoch = self._epoch_at(position)
            num_batches = epoch.num_batches(self.global_batch)
            ahead = (step - first_step) // num_batches
            if ahead == 0:
                return first_step, epoch
            if not self.order.is_regular:
                ahead = 1
            first_step += ahead * num_batches
            position += ahead * len(epoch.positions)
            if not self.order.is_regular:
                self._starts.append((first_step, position))
