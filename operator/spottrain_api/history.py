"""The course of a job, kept by the operator in a ConfigMap beside it, for reports after the fact.

One line of CSV a point; bounded by thinning out, so that it stays far below the size limit of an object.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import astuple, dataclass, fields

HISTORY_KEY = "history.csv"
MAX_POINTS = 2000


def history_name(job: str) -> str:
    """Name of the ConfigMap that holds the history of a job."""
    return f"{job}-history"


@dataclass(frozen=True, slots=True, kw_only=True)
class HistoryPoint:
    """The job at a moment: `at` is Unix time in seconds, `loss` NaN where there is none yet.

    `phase` is the job's phase; `on_demand` and `spot` count the members of the generation that trains (0 while
    none does); `committed_step` is the newest commit's.
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
        """Parse one line's cells. ValueError: the line isn't a point."""
        kinds = {"float": float, "int": int, "str": str}
        names = fields(cls)
        if len(row) != len(names):
            raise ValueError(f"a point of the history has {len(names)} cells, not {len(row)}")
        return cls(**{field.name: kinds[str(field.type)](cell) for field, cell in zip(names, row, strict=True)})


def _text(value: object) -> str:
    return f"{value:.3f}" if isinstance(value, float) else str(value)


def thin_out(points: Sequence[HistoryPoint], limit: int = MAX_POINTS) -> tuple[HistoryPoint, ...]:
    """At most `limit` points: of the older half every second one is dropped, but never a change of phase."""
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
