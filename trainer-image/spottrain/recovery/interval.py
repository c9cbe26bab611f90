"""How often to save between drains.

`auto` follows Young (1974) and Daly (2006). If a checkpoint costs C seconds of training, and M is the mean time
between losses, a checkpoint every sqrt(2 * C * M) seconds loses the least time. An interruption with notice loses
nothing, so M counts only those without: T / (N * (1 - r)) for N interruptions in T seconds, of which a share r came
with notice. M does not count losses that peers' memory covered, either: they cost a step or two at any interval.
Checkpoints are for what memory does not cover: a member and its peer at once, or all members.

While a cloud recommends to leave the node of a member, M is ten minutes at most: the node may go, and not every cloud
gives notice each time.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from spottrain_api.contract.configuration import Interruptions
from spottrain_api.settings.interval import Interval
from spottrain_runtime.wording import counted

# Assumed before any loss is observed: one loss without notice an hour. It weighs as much as an observed one.
PRIOR_SECONDS_BETWEEN_LOSSES = 3600.0
# Assumed while a member's node is at risk. Most of such nodes stay, or go with notice, hours later.
SECONDS_BETWEEN_LOSSES_AT_RISK = 600.0
MIN_INTERVAL_SECONDS = 10.0
MAX_INTERVAL_SECONDS = 1800.0


@dataclass(frozen=True, slots=True, kw_only=True)
class CommitInterval:
    """How often to save: by steps, by seconds, or as often as pays off.

    It is as often as pays off if neither `steps` nor `seconds` is set.

    Attributes:
        steps: Steps from one save to the next.
        seconds: Seconds from one save to the next.
        interruptions: What the job has seen so far; for `auto`.
    """

    steps: int | None = None
    seconds: float | None = None
    interruptions: Interruptions = Interruptions()

    @classmethod
    def of(cls, interval: Interval, interruptions: Interruptions) -> CommitInterval:
        """That of `checkpoint.interval`, and of what the job has seen."""
        return cls(steps=interval.steps, seconds=interval.seconds, interruptions=interruptions)

    def due_at_step(self, step: int) -> bool:
        """Whether to save after this step because of its number; the same on every rank."""
        return self.steps is not None and step % self.steps == 0

    def due_after(self, elapsed_seconds: float, cost: CheckpointCost | None, *, at_risk: bool = False) -> bool:
        """Whether a save is due so many seconds after the last one.

        Rank 0's clock decides for all. With `auto`, the first save comes early, because it measures the cost, and
        saves are more frequent while a member's node is `at_risk`.
        """
        return self.steps is None and elapsed_seconds >= self._seconds(cost, at_risk)

    def planned_seconds(
        self, cost: CheckpointCost | None, step_seconds: float | None, *, at_risk: bool = False
    ) -> float | None:
        """Seconds from one save to the next.

        None if the interval is a number of steps whose duration is not known.
        """
        if self.steps is None:
            return self._seconds(cost, at_risk)
        return None if step_seconds is None else self.steps * step_seconds

    def _seconds(self, cost: CheckpointCost | None, at_risk: bool) -> float:
        if self.seconds is not None:
            return self.seconds
        return MIN_INTERVAL_SECONDS if cost is None else self.optimal_seconds(cost, at_risk=at_risk)

    def optimal_seconds(self, cost: CheckpointCost, *, at_risk: bool = False) -> float:
        """The interval that loses the least time, within bounds. It is long enough that saves do not overlap."""
        between_losses = seconds_between_losses(self.interruptions)
        if at_risk:
            between_losses = min(between_losses, SECONDS_BETWEEN_LOSSES_AT_RISK)
        best = math.sqrt(2 * cost.stall_seconds * between_losses)
        return min(MAX_INTERVAL_SECONDS, max(best, MIN_INTERVAL_SECONDS, 2 * cost.total_seconds))

    def explain(self, cost: CheckpointCost | None, *, at_risk: bool = False) -> str:
        """The interval and the reason for it, for the status."""
        if self.steps is not None:
            return f"every {counted(self.steps, 'step')}, as the job says"
        if self.seconds is not None:
            return f"every {self.seconds:g} s, as the job says"
        if cost is None:
            return f"auto: the first after {MIN_INTERVAL_SECONDS:g} s, to measure what a checkpoint costs"
        seen = self.interruptions
        unnoticed = seen.num - seen.num_noticed
        covered = f", {seen.num_covered} of them covered by peers' memory" if seen.num_covered else ""
        losses = "there was no interruption so far"
        if at_risk:
            losses = "a member's node may be taken back soon"
        elif seen.num:
            minutes = seen.observed_seconds / 60
            within = f"{minutes / 60:.1f} h" if minutes >= 60 else f"{minutes:.1f} min"
            losses = f"{unnoticed} of {counted(seen.num, 'interruption')} in {within} came without notice{covered}"
        return (
            f"auto: every {self.optimal_seconds(cost, at_risk=at_risk):.0f} s, because a checkpoint stops training "
            f"for {cost.stall_seconds:.2g} s and is stored after {cost.total_seconds:.2g} s, and {losses}"
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckpointCost:
    """What a checkpoint costs.

    Attributes:
        stall_seconds: How long training stands still for it.
        total_seconds: From its start until it is committed.
    """

    stall_seconds: float
    total_seconds: float

    def updated(self, newest: CheckpointCost) -> CheckpointCost:
        """The cost including the newest checkpoint.

        It rises at once and falls slowly: a forecast that is too short loses steps.
        """
        return CheckpointCost(
            stall_seconds=max(newest.stall_seconds, (self.stall_seconds + newest.stall_seconds) / 2),
            total_seconds=max(newest.total_seconds, (self.total_seconds + newest.total_seconds) / 2),
        )


def seconds_between_losses(seen: Interruptions) -> float:
    """Mean time between losses, observed and assumed.

    A loss is an interruption without notice that peers' memory did not cover.
    """
    losses = seen.num - seen.num_noticed - seen.num_covered
    return (PRIOR_SECONDS_BETWEEN_LOSSES + seen.observed_seconds) / (1 + losses)
