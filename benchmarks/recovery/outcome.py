"""What a fault cost: the seconds without a new step, and the repeated steps."""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

# Before the fault, and after it.
WARM_STEPS, SETTLED_STEPS = 150, 20
PATIENCE_SECONDS = 400.0


@dataclass(frozen=True, slots=True)
class CompletedStep:
    """A completed step: Unix time in seconds, its number, and the members that made it."""

    at: float
    number: int
    world_size: int


@dataclass(frozen=True, slots=True)
class Outcome:
    """What a fault cost a job.

    `seconds_without_step` is None if the job didn't come back in time or, with `has_ended`, never will. `phases` are
    the seconds of its parts, for a side that knows them. `stopped_at` is when the last step before the gap was done.
    """

    seconds_without_step: float | None
    steps_redone: int | None
    has_ended: bool = False
    phases: dict[str, float] = field(default_factory=dict)
    stopped_at: float | None = None


def read_steps(path: Path) -> list[CompletedStep]:
    if not path.exists():
        return []
    rows = (line.split() for line in path.read_text().split("\n")[:-1])
    return [CompletedStep(float(at), int(number), int(world_size)) for at, number, world_size in rows]


def outcome_of(
    steps: Callable[[], list[CompletedStep]],
    hurt_at: float,
    patience_seconds: float,
    has_ended: Callable[[], bool] = lambda: False,
) -> Outcome:
    """Wait until a smaller world than before `hurt_at` makes steps; return the cost.

    The wait ends early if `has_ended` says that no world will. The old world may make a few more steps after the
    fault. The gap is the longest one between two steps until the smaller world has settled.
    """
    deadline = time.time() + patience_seconds
    while time.time() < deadline:
        done = steps()
        change = _first_of_smaller_world(done, hurt_at)
        if change is not None and len(done) - change > SETTLED_STEPS:
            since = [pair for pair in itertools.pairwise(done[: change + SETTLED_STEPS]) if pair[1].at > hurt_at]
            last, first = max(since, key=lambda pair: pair[1].at - pair[0].at)
            highest_before = max(step.number for step in done[:change])
            redone = max(0, highest_before - done[change].number + 1)
            return Outcome(first.at - last.at, redone, stopped_at=last.at)
        if has_ended():
            return Outcome(None, None, has_ended=True)
        time.sleep(0.2)
    return Outcome(None, None)


def _first_of_smaller_world(done: list[CompletedStep], hurt_at: float) -> int | None:
    """The index of the first step that fewer members made than one before the fault."""
    before = max((step.world_size for step in done if step.at <= hurt_at), default=0)
    return next((index for index, step in enumerate(done) if step.at > hurt_at and step.world_size < before), None)
