"""The course of a job, for later reports.

The operator keeps it in a TrainingJobHistory of the job's name. Each point is a line of CSV. Old points are thinned
out, so that the object stays far below its size limit.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

HISTORY_KIND = "TrainingJobHistory"
HISTORY_PLURAL = "trainingjobhistories"
HISTORY_FIELD = "csv"
MAX_POINTS = 1000
NUM_CELLS = 9
# A point takes about 70 characters.
MAX_HISTORY_CHARACTERS = 500_000


@dataclass(frozen=True, slots=True, kw_only=True)
class HistoryPoint:
    """The job at one time.

    `at` is Unix time in seconds. `loss` is NaN before the first one. `phase` is the job's phase. `on_demand` and
    `spot` count the members of the generation that trains (0 while none does). `committed_step` is the step of the
    newest commit.
    """

    at: float
    step: int
    loss: float
    tokens_per_second: float
    generation: int
    on_demand: int
    spot: int
    committed_step: int
    phase: str

    def to_row(self) -> str:
        return (
            f"{self.at:.3f},{self.step},{self.loss:.6g},{self.tokens_per_second:.6g},{self.generation},"
            f"{self.on_demand},{self.spot},{self.committed_step},{self.phase}"
        )

    @classmethod
    def from_row(cls, row: Sequence[str]) -> HistoryPoint:
        """Parse the cells of one line; a newer version may add more at its end.

        ValueError: they aren't a point.
        """
        if len(row) < NUM_CELLS:
            raise ValueError(f"a point of the history has {NUM_CELLS} cells, not {len(row)}")
        at, step, loss, tokens_per_second, generation, on_demand, spot, committed_step, phase = row[:NUM_CELLS]
        return cls(
            at=float(at),
            step=int(step),
            loss=float(loss),
            tokens_per_second=float(tokens_per_second),
            generation=int(generation),
            on_demand=int(on_demand),
            spot=int(spot),
            committed_step=int(committed_step),
            phase=phase,
        )


def thin_out(points: Sequence[HistoryPoint], limit: int = MAX_POINTS) -> tuple[HistoryPoint, ...]:
    """At most `limit` points.

    Every second point of the older half goes, except those that change the phase.
    """
    kept = list(points)
    while len(kept) > limit:
        half = len(kept) // 2
        older = [
            point
            for index, point in enumerate(kept[:half])
            if index % 2 == 0 or index == 0 or point.phase != kept[index - 1].phase
        ]
        if len(older) == half:
            older = older[half // 2 :]
        kept = older + kept[half:]
    return tuple(kept)
