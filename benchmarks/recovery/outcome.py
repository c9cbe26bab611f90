"""What a fault cost: the seconds without a new step, and the repeated steps."""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

SETTLED_STEPS = 20


@dataclass(frozen=True, slots=True)
class CompletedStep:
    """A completed step: Unix time in seconds, and its number."""

    at: float
    number: int


@dataclass(frozen=True, slots=True)
class Outcome:
    """What a fault cost a job.

    `seconds_without_step` is None if the job didn't come back in time or, with `has_ended`, never will.
    """

    seconds_without_step: float | None
    steps_redone: int | None
    has_ended: bool = False


def read_steps(path: Path) -> list[CompletedStep]:
    if not path.exists():
        return []
    lines = path.read_text().split("\n")[:-1]
    return [CompletedStep(float(at), int(number)) for at, number in (line.split() for line in lines)]


def outcome_of(
    steps: Callable[[], list[CompletedStep]],
    hurt_at: float,
    patience_seconds: float,
    has_ended: Callable[[], bool] = lambda: False,
) -> Outcome:
    """Wait until a world that started after `hurt_at` makes steps; return the cost.

    The wait ends early if `has_ended` says that no world will. The old world may make a few more steps after the
    fault. The gap is the longest one between two steps.
    """
    deadline = time.time() + patience_seconds
    while time.time() < deadline:
        done = steps()
        gap, index = _longest_gap(done, hurt_at)
        if index is not None and gap > 1.0 and len(done) - index > SETTLED_STEPS:
            highest_before = max(step.number for step in done[:index])
            return Outcome(gap, max(0, highest_before - done[index].number + 1))
        if has_ended():
            return Outcome(None, None, has_ended=True)
        time.sleep(0.2)
    return Outcome(None, None)


def _longest_gap(steps: list[CompletedStep], hurt_at: float) -> tuple[float, int | None]:
    """Return the longest gap between steps after the fault, and its end's index.

    The end is the step after the gap.
    """
    gaps = [
        (later.at - earlier.at, index)
        for index, (earlier, later) in enumerate(itertools.pairwise(steps), start=1)
        if later.at > hurt_at
    ]
    return max(gaps, default=(0.0, None))
