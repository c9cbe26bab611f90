"""What to do about steps that would spoil the model."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from ..contract import StabilityAction
from .resource import Resource


class LossSpike(Resource):
    """A step whose loss is more than `factor` times the median of the `window` good steps before it."""

    factor: Annotated[float, Field(ge=1)]
    window: Annotated[int, Field(ge=1, le=10_000)] = 50
    action: StabilityAction = StabilityAction.ROLLBACK


class Stability(Resource):
    """What to do about a step that would spoil the model: `fail` ends the job, `skip` makes no update, `rollback`
    undoes everything since the newest commit. Training goes on with the next samples.

    `nonFinite` is for losses and gradients that are not finite. A run that has to be rolled back to the same commit
    more than `maxRollbacks` times fails. Without `stability` steps are not judged.
    """

    non_finite: StabilityAction = StabilityAction.FAIL
    loss_spike: LossSpike | None = None
    max_rollbacks: Annotated[int, Field(ge=1, le=1000)] = 3
