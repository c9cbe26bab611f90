"""The durations that the docs promise are those of `timing`."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from spottrain_operator.core import timing
from spottrain_operator.core.timing import (
    FIRST_GENERATION_PATIENCE,
    GROWTH_INTERVAL,
    GROWTH_MIN_REMAINING,
    NEXT_GENERATION_PATIENCE,
    NO_STEP,
    SILENT_ALONE,
    SILENT_ON_LOST_NODE,
    SILENT_WHILE_OTHERS_ENDED,
    SILENT_WHILE_STUCK,
    STEPPING,
    UNKNOWN_LEAD,
    UNWATCHED,
    WITHOUT_RELAY,
)

DOCS = Path(__file__).parents[2] / "docs"
ROW = re.compile(r"^\| `([A-Z_]+)` \| ([\d.]+) \|", re.MULTILINE)


def test_the_table_of_constants() -> None:
    rows = ROW.findall((DOCS / "how-to" / "notices-and-intervals.md").read_text())
    assert {"SILENT_WHILE_OTHERS_ENDED", "SILENT_WHILE_STUCK", "SILENT_ALONE"} <= {name for name, _ in rows}
    assert {name: float(seconds) for name, seconds in rows} == {name: getattr(timing, name) for name, _ in rows}


@pytest.mark.parametrize(
    ("page", "sentence"),
    [
        ("notices", f"| some have ended | {SILENT_WHILE_OTHERS_ENDED:g} s |"),
        ("notices", f"doesn't answer | {SILENT_ON_LOST_NODE:g} s |"),
        ("notices", f"has just gone | at least {WITHOUT_RELAY:g} s |"),
        ("notices", f"stuck: no step for {SILENT_WHILE_STUCK:g} s, and"),
        ("notices", f"as long as a step takes | {SILENT_WHILE_STUCK:g} s |"),
        ("notices", f"| make steps: the newest is under {STEPPING:g} s old, or"),
        ("notices", f"such as before the first step | {SILENT_ALONE:g} s |"),
        ("notices", f"the job's message says so after {NO_STEP:g} s."),
        ("notices", f"the watcher of a spot node | after {UNWATCHED:g} s,"),
        ("notices", f"Unknown deadline (the watcher's taint without its notice): {UNKNOWN_LEAD:g} s,"),
        ("generations", f"waits up to {FIRST_GENERATION_PATIENCE:g} s for more pods"),
        ("generations", f"later ones up to {NEXT_GENERATION_PATIENCE:g} s."),
        ("generations", f"at most every {GROWTH_INTERVAL:g} s,"),
        ("generations", f"last {GROWTH_MIN_REMAINING:g} s of a job"),
    ],
)
def test_the_concepts(page: str, sentence: str) -> None:
    assert sentence in " ".join((DOCS / "concepts" / f"{page}.md").read_text().split())
