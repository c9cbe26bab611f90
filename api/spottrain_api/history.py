"""The course of a job, for later reports.

The operator keeps it in a TrainingJobHistory of the job's name. Each point is a line of CSV. Old points are thinned
out, so that the object stays far below its size limit.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import astuple, dataclass, fields

HISTORY_KIND = "TrainingJobHistory"
HISTORY_PLURAL = "trainingjobhistories"
HISTORY_FIELD = "csv"
MAX_POINTS = 2000
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
        return ",".join(
            f"{value:.6g}" if isinstance(value, float) and i else _text(value)
            for i, value in enumerate(astuple(self))
        )

    @classmethod
    def from_row(cls, row: Sequence[str]) -> HistoryPoint:
        """Parse the cells of one line; a newer version may add more at its end.

        ValueError: they aren't a point.
        """
        kinds = {"float": float, "int": int, "str": str}
        names = fields(cls)
        if len(row) < len(names):
            raise ValueError(f"a point of the history has {len(names)} cells, not {len(row)}")
        return cls(**{field.name: kinds[str(field.type)](cell) for field, cell in zip(names, row, strict=False)})


def _text(value: object) -> str:
    return f"{value:.3f}" if isinstance(value, float) else str(value)


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
