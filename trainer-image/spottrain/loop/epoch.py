"""One epoch of a run, as the user's script sees it."""

from __future__ import annotations

from collections.abc import Iterator

from spottrain.loop.step import Step
from spottrain.world.failures import UserError


class Epoch:
    """The steps of one epoch; `Training.epochs` yields it. Loop over it once.

    Attributes:
        number: Number of the epoch in the whole run, from 0.
    """

    def __init__(self, number: int, num_steps: int, steps: Iterator[Step]) -> None:
        self.number = number
        self._num_steps = num_steps
        self._steps: Iterator[Step] | None = steps

    def __len__(self) -> int:
        """Steps of the whole epoch, also of those before a resume."""
        return self._num_steps

    def __iter__(self) -> Iterator[Step]:
        """The steps that are left of it.

        Raises:
            UserError: This is a second loop over the epoch.
        """
        if self._steps is None:
            raise UserError(
                f"A second loop over the steps of epoch {self.number} was begun, and each is made once; do both in "
                "one loop, or raise the number of epochs."
            )
        steps, self._steps = self._steps, None
        return steps
