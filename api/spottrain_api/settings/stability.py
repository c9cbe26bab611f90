"""What to do about steps that would spoil the model."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from spottrain_api.settings.choices import StabilityAction
from spottrain_api.settings.resource import Resource


class LossSpikeConfig(Resource):
    """When a loss counts as a spike, and what to do about it."""

    factor: Annotated[
        float,
        Field(
            ge=1,
            description="Multiple of the median loss in the window above which a loss is a spike. If losses can be "
            "negative, the limit is the median plus factor - 1 times the median of their magnitudes.",
        ),
    ]
    window: Annotated[
        int,
        Field(
            ge=1,
            le=10_000,
            description="Number of good steps whose median loss is the measure. No step is a spike before there are "
            "as many.",
        ),
    ] = 50
    action: Annotated[StabilityAction, Field(description="What to do about a step whose loss is a spike.")] = (
        StabilityAction.ROLLBACK
    )


class StabilityConfig(Resource):
    """What to do about steps that would spoil the model.

    After a skip or a rollback, training continues with the next samples. Without it, steps are not judged.

    Example:
        >>> from spottrain import LossSpikeConfig, StabilityAction, StabilityConfig
        >>> stability = StabilityConfig(non_finite=StabilityAction.SKIP, loss_spike=LossSpikeConfig(factor=3.0))
        >>> stability.loss_spike.action
        <StabilityAction.ROLLBACK: 'rollback'>
    """

    non_finite: Annotated[
        StabilityAction, Field(description="What to do about a step whose loss or gradient is not finite.")
    ] = StabilityAction.FAIL
    loss_spike: Annotated[
        LossSpikeConfig | None,
        Field(description="When a loss counts as a spike, and what to do about it. Default: spikes are not judged."),
    ] = None
    max_rollbacks: Annotated[
        int,
        Field(
            ge=1,
            le=1000,
            description="Number of rollbacks to the same commit after which the next one fails the job.",
        ),
    ] = 3
