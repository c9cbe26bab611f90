"""One epoch of a run, as the user's script sees it."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Generic, TypeVar

from spottrain.world.failures import UserError

Each = TypeVar("Each")


class Epoch(Generic[Each]):
    """The steps of one epoch, or its batches; `Training.epochs` and `Run.epochs` yield it. Loop over it once.

    Attributes:
        number: Number of the epoch in the whole run, from 0.
        first_step: Steps of the run before it.
    """

    def __init__(self, number: int, steps: range, left: Iterator[Each]) -> None:
        """`steps` are all of the epoch, counted from 0; `left` is what a loop over it goes through."""
        self.number = number
        self.first_step = steps.start
        self._num_steps = len(steps)
        self._left: Iterator[Each] | None = left

    def __len__(self) -> int:
        """Steps of the whole epoch, also of those before a resume."""
        return self._num_steps

    def __iter__(self) -> Iterator[Each]:
        """What is left of it.

        Raises:
            UserError: This is a second loop over the epoch.
        """
        if self._left is None:
            raise UserError(
                f"A second loop over the steps of epoch {self.number} was begun, and each is made once; do both in "
                "one loop, or raise the number of epochs."
            )
        left, self._left = self._left, None
        return left
