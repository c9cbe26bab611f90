"""Why what a job asks of another controller can't be had."""

from __future__ import annotations

from dataclasses import dataclass

from spottrain_api.contract.conditions import ConditionReason


@dataclass(frozen=True, slots=True, kw_only=True)
class Trouble:
    """Why the objects can't be made by which a job asks, as a reason and a sentence with what to do."""

    reason: ConditionReason
    message: str
