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
# A second that counts for the wrong phase is as bad as so many without a point. A change to a phase of some seconds
# then outlives the points of the hours around it.
PHASE_WEIGHT = 1000.0


@dataclass(frozen=True, slots=True, kw_only=True)
class HistoryPoint:
    """The job at one time.

    Attributes:
        at: Unix time in seconds.
        loss: NaN before the first one.
        on_demand, spot: Members of the generation that trains; 0 while none does.
        committed_step: Step of the newest commit.
        phase: The job's phase.
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
    """Keep at most `limit` points.

    The first point stays, and the newer half. Of the others, those go that are missed least: where points are dense,
    and changes to the shortest phases. However often a history is thinned out, its points spread over all its time.
    """
    kept = list(points)
    while len(kept) > limit:
        older = sorted(range(1, len(kept) // 2), key=lambda index: _loss_without(*kept[index - 1 : index + 2]))
        gone: set[int] = set()
        # A few at a time, and no neighbours: what is lost without a point depends on those beside it.
        for index in older[: min(len(kept) - limit, 1 + len(older) // 8)]:
            if gone.isdisjoint((index - 1, index + 1)):
                gone.add(index)
        kept = [point for index, point in enumerate(kept) if index not in gone]
    return tuple(kept)


def _loss_without(before: HistoryPoint, point: HistoryPoint, after: HistoryPoint) -> float:
    """Rate what a history loses with `point`, in seconds without a point."""
    in_another_phase = after.at - point.at if point.phase != before.phase else 0.0
    return after.at - before.at + PHASE_WEIGHT * in_another_phase
