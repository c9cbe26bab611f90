"""When to save, and how long a save is expected to take."""

from __future__ import annotations

import time
from dataclasses import dataclass, field

from spottrain.recovery.interval import CheckpointCost, CommitInterval

# A save that starts at the last safe moment may take SAFETY_FACTOR times its forecast and SAFETY_SECONDS more. From a
# rank's ballot until the ranks stop, two steps pass; BALLOT_STEPS has one to spare.
SAFETY_FACTOR = 1.5
SAFETY_SECONDS = 1.0
BALLOT_STEPS = 3


@dataclass(slots=True, kw_only=True)
class CheckpointSchedule:
    """When one rank of a generation saves next. It learns the cost of a save from the saves before.

    Attributes:
        waits_for_last_safe_moment: Whether the job has `checkpoint.onNotice: lastSafe`.
        cost: Cost of the saves so far, also in earlier generations; None before the first.
        agreed_seconds: Rank 0's forecast of a save, which all ranks know.
        at_risk: Whether a member's node may be taken back soon, which all ranks know.
    """

    interval: CommitInterval
    waits_for_last_safe_moment: bool = False
    cost: CheckpointCost | None = None
    agreed_seconds: float | None = None
    at_risk: bool = False
    _started_at: float = field(default_factory=time.monotonic)

    def started(self) -> None:
        """Note that a save in the background starts now."""
        self._started_at = time.monotonic()

    def seconds_since_start(self) -> float:
        """Time since the newest save in the background started.

        Before the first, it is the time since the generation started.
        """
        return time.monotonic() - self._started_at

    def learn(self, cost: CheckpointCost) -> None:
        """Update the cost by that of the newest save."""
        self.cost = cost if self.cost is None else self.cost.updated(cost)

    def is_due_at_step(self, step: int) -> bool:
        """Whether to save after this step because of its number; the same on every rank."""
        return self.interval.due_at_step(step)

    def is_due(self) -> bool:
        """Whether a save is due by this rank's clock."""
        return self.interval.due_after(self.seconds_since_start(), self.cost, at_risk=self.at_risk)

    def forecast_seconds(self, *, is_saving: bool) -> float | None:
        """Seconds that a save would take if it started now.

        None before the cost is known. If `is_saving`, the save starts after the one under way. Rank 0's forecast
        counts, because its saves end when those of all ranks have ended.
        """
        if self.cost is None:
            return None
        total = self.cost.total_seconds
        return total + max(0.0, total - self.seconds_since_start()) if is_saving else total

    def last_safe_seconds(self, step_seconds: float | None) -> float | None:
        """How long before a deadline the ranks have to agree on the last save. None: they agree at once."""
        if not self.waits_for_last_safe_moment or self.agreed_seconds is None or step_seconds is None:
            return None
        return SAFETY_FACTOR * self.agreed_seconds + BALLOT_STEPS * step_seconds + SAFETY_SECONDS

    def safe_seconds(self) -> float | None:
        """How long before a deadline a save has to start; None before its cost is known."""
        return SAFETY_FACTOR * self.agreed_seconds + SAFETY_SECONDS if self.agreed_seconds is not None else None

    def fits(self, seconds_left: float) -> bool:
        """Whether a save can end within so many seconds, by the agreed forecast.

        The answer is the same on all ranks.
        """
        return self.agreed_seconds is None or self.agreed_seconds <= seconds_left

    def interval_seconds(self, step_seconds: float | None) -> float | None:
        """Seconds from one save to the next.

        None if the interval is a number of steps whose duration is not known yet.
        """
        return self.interval.planned_seconds(self.cost, step_seconds, at_risk=self.at_risk)

    def explain(self) -> str:
        """The interval and the reason for it, for the status."""
        return self.interval.explain(self.cost, at_risk=self.at_risk)
