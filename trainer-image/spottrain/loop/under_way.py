"""The steps of a run for a loop that the library doesn't own: one is under way, and the owner ends it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TypeVar

from spottrain.loop.acceptance import checked_total
from spottrain.loop.epoch import Epoch
from spottrain.loop.step import Step
from spottrain.loop.training import Training
from spottrain.world.failures import UserError

Each = TypeVar("Each")


class StepsUnderWay:
    """Goes through the steps of a run, or through those of its epochs.

    Attributes:
        step: The step under way. None: the run is over, or the epoch, until `epochs` goes on to the next one.
        epoch: The epoch under way, if the run has epochs.
    """

    def __init__(self, training: Training, *, total: int | None, epochs: int | None) -> None:
        """Resume from the newest commit. A collective.

        Args:
            training: What commits and resumes.
            total: Steps of the whole run; None if it ends with its last epoch.
            epochs: Epochs of the whole run; None if it has steps alone.

        Raises:
            UserError: As `Training.steps`.
        """
        self.step: Step | None = None
        self.epoch: Epoch[Step] | None = None
        self.is_by_epoch = epochs is not None
        self._epochs: Iterator[Epoch[Step]] = iter(())
        if epochs is not None:
            self._epochs = training.epochs(epochs, total=total)
            self._begin_epoch()
        else:
            self._begin(training.steps(checked_total(total)))

    def advance(self) -> None:
        """End the step under way, which was updated. A collective. Raises Drained."""
        self.step = next(self._steps, None)

    def epochs(self, left: Callable[[], Iterator[Each]], advice: str) -> Iterator[Epoch[Each]]:
        """The epochs that are left, each with what `left` gives for it.

        Args:
            left: What a loop over an epoch goes through, called at its start.
            advice: How the script asks for epochs.

        Raises:
            UserError: The run has steps, or an epoch was left early.
        """
        if not self.is_by_epoch:
            raise UserError(advice)
        while (epoch := self.epoch) is not None:
            steps = range(epoch.first_step, epoch.first_step + len(epoch))
            yield Epoch(epoch.number, steps, left())
            self._begin_epoch()

    def _begin_epoch(self) -> None:
        self.epoch = next(self._epochs, None)
        self._begin(iter(self.epoch) if self.epoch is not None else iter(()))

    def _begin(self, steps: Iterator[Step]) -> None:
        self._steps = steps
        self.advance()
