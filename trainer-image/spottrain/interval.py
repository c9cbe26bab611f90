"""When to commit between drains.

`auto` follows Young (1974) and Daly (2006): with a checkpoint that costs C seconds of training and a mean
time between interruptions M, the least time is lost with a checkpoint every sqrt(2 * C * M) seconds.
"""

from __future__ import annotations

import math
import re
from dataclasses import dataclass

# Before anything is known: spot nodes of a job are interrupted about once in two hours, half of the time
# with a notice that lets nothing be lost.
PRIOR_SECONDS_BETWEEN_INTERRUPTIONS = 3600.0
MIN_INTERVAL_SECONDS = 10.0
MAX_INTERVAL_SECONDS = 1800.0

_PATTERN = re.compile(r"([1-9][0-9]*)(steps|s|m)")


@dataclass(frozen=True, slots=True, kw_only=True)
class CommitInterval:
    """Exactly one is set, or neither: then the interval is found from what checkpoints cost."""

    steps: int | None = None
    seconds: float | None = None

    @classmethod
    def parse(cls, text: str) -> CommitInterval:
        """Raises ValueError, with a sentence, for anything but "auto", "<n>steps", "<n>s" and "<n>m"."""
        if text == "auto":
            return cls()
        match = _PATTERN.fullmatch(text)
        if match is None:
            raise ValueError(
                f"checkpoint.interval {text!r} is not understood; write auto, or a number with steps, s or m, "
                "as in 50steps"
            )
        number = int(match[1])
        if match[2] == "steps":
            return cls(steps=number)
        return cls(seconds=number * (60.0 if match[2] == "m" else 1.0))

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
        return elapsed_seconds >= (MIN_INTERVAL_SECONDS if cost is None else young_daly_seconds(cost))


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckpointCost:
    """What the newest checkpoint took: of training (`stall_seconds`), and in all until it was committed."""

    stall_seconds: float
    total_seconds: float


def young_daly_seconds(
    cost: CheckpointCost, seconds_between_interruptions: float = PRIOR_SECONDS_BETWEEN_INTERRUPTIONS
) -> float:
    """The interval that loses the least time, in bounds; never so short that saves overlap."""
    best = math.sqrt(2 * cost.stall_seconds * seconds_between_interruptions)
    return min(MAX_INTERVAL_SECONDS, max(best, MIN_INTERVAL_SECONDS, 2 * cost.total_seconds))
