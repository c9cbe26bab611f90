"""How many samples of each source the steps of a run use, with weights that change."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from spottrain.data.mixtures.apportionment import Weights, apportioned
from spottrain.data.order import Indices


@dataclass(frozen=True, slots=True, eq=False)
class _Phase:
    """Steps with the same weights: the number of the first, and the samples of each source before it."""

    first_step: int
    weights: Weights
    before: Indices


class Shares:
    """The samples of each source, step after step.

    Attributes:
        global_batch: Samples of a step.
    """

    def __init__(self, weights: Mapping[int, Weights], *, global_batch: int) -> None:
        """Count the samples of each source up to each change of the weights.

        Args:
            weights: Of each source, by the number of the step from which they hold, from 0. Each sum is 1.
            global_batch: Samples of a step.
        """
        self.global_batch = global_batch
        self._phases: list[_Phase] = []
        for first_step in sorted(weights):
            before = self.before(first_step) if self._phases else np.zeros(len(weights[0]), np.int64)
            self._phases.append(_Phase(first_step, weights[first_step], before))

    @property
    def weights(self) -> list[tuple[int, list[float]]]:
        """The weights of each source, each time with the step from which they hold."""
        return [(phase.first_step, phase.weights.tolist()) for phase in self._phases]

    def before(self, step: int) -> Indices:
        """Samples of each source that the steps before this one use, counted from 0."""
        phase = self._phases[bisect_right(self._phases, step, key=lambda each: each.first_step) - 1]
        return phase.before + apportioned((step - phase.first_step) * self.global_batch, phase.weights)
