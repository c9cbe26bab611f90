"""When to commit between drains.

`auto` follows Young (1974) and Daly (2006): with a checkpoint that costs C seconds of training and a mean
time M between losses, the least time is lost with a checkpoint every sqrt(2 * C * M) seconds. An interruption
with notice loses nothing, so that M counts those without: of N interruptions in T seconds, of which a share r
came with notice, T / (N * (1 - r)). Nor does M count those after which training went on from peers' memory: what
they cost, a step or two, is the same at any interval. What memory did not cover (a member and its peer at once, or
all of them) is what checkpoints are left for.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from spottrain_api.contract import AUTO_INTERVAL, Interruptions

# Before anything is known: one loss without notice an hour. It weighs as much as one that was observed.
PRIOR_SECONDS_BETWEEN_LOSSES = 3600.0
MIN_INTERVAL_SECONDS = 10.0
MAX_INTERVAL_SECONDS = 1800.0


@dataclass(frozen=True, slots=True, kw_only=True)
class CommitInterval:
    """Exactly one of `steps` and `seconds` is set, or neither: then the interval is found from what checkpoints
    cost and how often nodes are lost."""

    steps: int | None = None
    seconds: float | None = None
    interruptions: Interruptions = Interruptions()

    @classmethod
    def parse(cls, text: str, interruptions: Interruptions | None = None) -> CommitInterval:
        """Of `checkpoint.interval`: "auto", "<n>steps", "<n>s" or "<n>m"."""
        if text == AUTO_INTERVAL:
            return cls(interruptions=interruptions or Interruptions())
        if text.endswith("steps"):
            return cls(steps=int(text.removesuffix("steps")))
        return cls(seconds=int(text[:-1]) * (60.0 if text.endswith("m") else 1.0))

    def due_at_step(self, step: int) -> bool:
        """Whether to commit after this step for its number alone; the same on every rank."""
        return self.steps is not None and step % self.steps == 0

    def due_after(self, elapsed_seconds: float, cost: CheckpointCost | None) -> bool:
        """Whether a commit is due that many seconds after the last; rank 0's clock decides for all.

        With `auto` and no cost measured yet, the first comes early: it tells what they cost.
        """
        if self.steps is not None:
            return False
        if self.seconds is not None:
            return elapsed_seconds >= self.seconds
        return elapsed_seconds >= (MIN_INTERVAL_SECONDS if cost is None else self.optimal_seconds(cost))

    def optimal_seconds(self, cost: CheckpointCost) -> float:
        """The interval that loses the least time, in bounds; never so short that saves overlap."""
        best = math.sqrt(2 * cost.stall_seconds * seconds_between_losses(self.interruptions))
        return min(MAX_INTERVAL_SECONDS, max(best, MIN_INTERVAL_SECONDS, 2 * cost.total_seconds))

    def explain(self, cost: CheckpointCost | None) -> str:
        """The interval and why it is that, for the status."""
        if self.steps is not None:
            return f"every {self.steps} steps, as the job says"
        if self.seconds is not None:
            return f"every {self.seconds:g} s, as the job says"
        if cost is None:
            return f"auto: the first after {MIN_INTERVAL_SECONDS:g} s, to measure what a checkpoint costs"
        seen = self.interruptions
        unnoticed = seen.num - seen.num_noticed
        covered = f", {seen.num_covered} of them covered by peers' memory" if seen.num_covered else ""
        return (
            f"auto: every {self.optimal_seconds(cost):.0f} s, as a checkpoint stops training for "
            f"{cost.stall_seconds:.2g} s and is stored after {cost.total_seconds:.2g} s, and {unnoticed} of "
            f"{seen.num} interruptions in {seen.observed_seconds / 3600:.1f} h came without notice{covered}"
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckpointCost:
    """What a checkpoint takes: of training (`stall_seconds`), and in all until it is committed."""

    stall_seconds: float
    total_seconds: float

    def updated(self, newest: CheckpointCost) -> CheckpointCost:
        """With what the newest one took: up at once and down slowly, as too short a forecast loses steps."""
        return CheckpointCost(
            stall_seconds=max(newest.stall_seconds, (self.stall_seconds + newest.stall_seconds) / 2),
            total_seconds=max(newest.total_seconds, (self.total_seconds + newest.total_seconds) / 2),
        )


def seconds_between_losses(seen: Interruptions) -> float:
    """Mean time between losses, which are interruptions without notice that peers' memory didn't cover: what was
    observed, beside the prior."""
    losses = seen.num - seen.num_noticed - seen.num_covered
    return (PRIOR_SECONDS_BETWEEN_LOSSES + seen.observed_seconds) / (1 + losses)
