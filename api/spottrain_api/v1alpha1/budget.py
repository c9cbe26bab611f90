"""How much money a job may cost."""

from __future__ import annotations

from enum import StrEnum
from typing import Annotated

from pydantic import Field

from spottrain_api.settings.resource import Resource


class OnExceeded(StrEnum):
    """What happens once a job has cost budget.maxCost.

    - Warn: an event and a condition say so, and the job trains on.
    - Suspend: the job commits and holds no nodes until maxCost is raised.
    """

    WARN = "Warn"
    SUSPEND = "Suspend"


class Budget(Resource):
    """A bound for what the job's nodes cost, as status.cost counts it."""

    max_cost: Annotated[
        float,
        Field(
            ge=0.01,
            allow_inf_nan=False,
            description="Money that the job's nodes may cost, in capacity.currency. Events report 80 % and 100 %.",
        ),
    ]
    on_exceeded: Annotated[
        OnExceeded,
        Field(
            description="What happens once maxCost is spent. `Warn`: the job trains on. `Suspend`: it commits, ends "
            "its generation and holds no nodes until maxCost is above what it has cost. The commit comes on top."
        ),
    ] = OnExceeded.WARN
