"""Throughput of a job from its history.

It is in tokens, or in samples if the script does not report tokens.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

from spottrain_api.history import HistoryPoint
from spottrain_api.v1alpha1.status import Phase


@dataclass(frozen=True, slots=True, kw_only=True)
class Stretch:
    """A stretch of time in which one generation trained.

    Attributes:
        begin, end: Unix times in seconds.
        amount: Tokens or samples.
    """

    generation: int
    begin: float
    end: float
    amount: float

    @property
    def rate(self) -> float:
        return self.amount / (self.end - self.begin)


@dataclass(frozen=True, slots=True, kw_only=True)
class Throughput:
    """All stretches of a job.

    Attributes:
        unit: "tokens" or "samples".
        stretches: Oldest first.
    """

    unit: str
    stretches: tuple[Stretch, ...]

    @property
    def amount(self) -> float:
        return sum(stretch.amount for stretch in self.stretches)

    @property
    def mean(self) -> float:
        """Amount per second over the time in which the job trained; 0 if it never did."""
        seconds = sum(stretch.end - stretch.begin for stretch in self.stretches)
        return self.amount / seconds if seconds else 0.0


def throughput(history: Sequence[HistoryPoint], samples_per_step: int, *, shortest: float = 0.0) -> Throughput:
    """Compute the throughput from each point of the history to the next.

    The job trains from a point in phase Running to the next one. In the history of a long job, that may be a point
    of a later generation.

    Args:
        history: Points of the job, oldest first.
        samples_per_step: Global batch, which counts if no point has tokens.
        shortest: Stretches of one generation are joined until they take so many seconds.
    """
    has_tokens = any(point.tokens_per_second for point in history)
    joined: list[Stretch] = []
    for before, after in pairwise(history):
        seconds = after.at - before.at
        if before.phase != Phase.RUNNING.value or seconds <= 0:
            continue
        made = after.tokens_per_second * seconds if has_tokens else (after.step - before.step) * samples_per_step
        new = Stretch(generation=before.generation, begin=before.at, end=after.at, amount=max(0.0, made))
        last = joined[-1] if joined else None
        if last is not None and last.generation == new.generation and last.end - last.begin < shortest:
            joined[-1] = replace(last, end=new.end, amount=last.amount + new.amount)
        else:
            joined.append(new)
    return Throughput(unit="tokens" if has_tokens else "samples", stretches=tuple(joined))
