"""The history of a job: what is written is read, and it stays bounded."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from spottrain_api.history import HistoryPoint, thin_out


def point(at: float, phase: str = "Running", loss: float = 1.5) -> HistoryPoint:
    return HistoryPoint(
        at=at,
        step=int(at),
        loss=loss,
        tokens_per_second=1234.5,
        generation=1,
        on_demand=2,
        spot=4,
        committed_step=0,
        phase=phase,
    )


def test_a_point_survives_its_row() -> None:
    written = point(1_700_000_000.25)
    assert HistoryPoint.from_row(written.to_row().split(",")) == written


def test_a_point_is_read_without_the_cells_that_a_newer_version_adds() -> None:
    written = point(1_700_000_000.25)
    assert HistoryPoint.from_row([*written.to_row().split(","), "0.5"]) == written
    with pytest.raises(ValueError, match="has 9 cells, not 8"):
        HistoryPoint.from_row(written.to_row().split(",")[:-1])


def test_no_loss_yet_is_nan() -> None:
    assert math.isnan(HistoryPoint.from_row(point(1.0, loss=math.nan).to_row().split(",")).loss)


@given(st.lists(st.sampled_from(["Running", "Draining", "Starting"]), max_size=300), st.integers(4, 60))
def test_thinning_keeps_to_the_limit_and_to_the_order(phases: list[str], limit: int) -> None:
    points = [point(float(at), phase) for at, phase in enumerate(phases)]
    thinned = thin_out(points, limit)
    assert len(thinned) <= limit
    assert [p.at for p in thinned] == sorted({p.at for p in thinned})
    assert set(thinned) <= set(points)
    assert thinned[:1] == tuple(points[:1])
    assert thinned[len(thinned) - 1 :] == tuple(points[len(points) - 1 :])


def test_thinning_keeps_each_change_of_phase_while_there_is_room() -> None:
    points = [point(float(at), "Draining" if at % 50 == 0 else "Running") for at in range(400)]
    thinned = thin_out(points, 250)
    assert [p.at for p in thinned if p.phase == "Draining"] == [float(at) for at in range(0, 400, 50)]


def seconds_by_phase(points: Sequence[HistoryPoint]) -> Counter[str]:
    seconds: Counter[str] = Counter()
    for before, after in pairwise(points):
        seconds[before.phase] += round(after.at - before.at)
    return seconds


def test_a_history_that_is_thinned_again_and_again_covers_all_its_time() -> None:
    """Each hour is a generation of 59 minutes, with a point each, and two phases."""
    points: list[HistoryPoint] = []
    thinned: tuple[HistoryPoint, ...] = ()
    for hour in range(100):
        course = [*((60.0 * minute, "Running") for minute in range(60)), (3570, "Draining"), (3575, "Starting")]
        added = [point(3600 * hour + at, phase) for at, phase in course]
        points += added
        thinned = thin_out((*thinned, *added), 400)
    assert thinned[0] == points[0]
    assert max(after.at - before.at for before, after in pairwise(thinned)) <= 2 * 3600
    true, told = seconds_by_phase(points), seconds_by_phase(thinned)
    assert told["Running"] == pytest.approx(true["Running"], rel=0.01)
    assert told["Draining"] + told["Starting"] >= (true["Draining"] + true["Starting"]) / 2
