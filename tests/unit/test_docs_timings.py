"""The durations that the docs promise are those of `timing`."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from spottrain_operator.core.timing import DEFAULT_TIMING

DOCS = Path(__file__).parents[2] / "docs"
ROW = re.compile(r"^\| `([a-z_]+)` \| ([\d.]+) \|", re.MULTILINE)


def test_the_table_of_constants() -> None:
    rows = ROW.findall((DOCS / "how-to" / "notices-and-intervals.md").read_text())
    assert {"silent_while_others_ended", "silent_while_stuck", "silent_alone"} <= {name for name, _ in rows}
    assert {name: float(seconds) for name, seconds in rows} == {
        name: getattr(DEFAULT_TIMING, name) for name, _ in rows
    }


@pytest.mark.parametrize(
    ("page", "sentence"),
    [
        ("notices", f"| some have ended | {DEFAULT_TIMING.silent_while_others_ended:g} s |"),
        ("notices", f"doesn't answer | {DEFAULT_TIMING.silent_on_lost_node:g} s |"),
        ("notices", f"has just gone | at least {DEFAULT_TIMING.without_relay:g} s |"),
        ("notices", f"stuck: no step for {DEFAULT_TIMING.silent_while_stuck:g} s, and"),
        ("notices", f"as long as a step takes | {DEFAULT_TIMING.silent_while_stuck:g} s |"),
        ("notices", f"| make steps: the newest is under {DEFAULT_TIMING.stepping:g} s old, or"),
        ("notices", f"such as before the first step | {DEFAULT_TIMING.silent_alone:g} s |"),
        ("notices", f"the job's message says so after {DEFAULT_TIMING.no_step:g} s."),
        ("notices", f"the watcher of a spot node | after {DEFAULT_TIMING.unwatched:g} s,"),
        ("notices", f"Unknown deadline (the watcher's taint without its notice): {DEFAULT_TIMING.unknown_lead:g} s,"),
        ("generations", f"waits up to {DEFAULT_TIMING.first_generation_patience:g} s for more pods"),
        ("generations", f"later ones up to {DEFAULT_TIMING.next_generation_patience:g} s."),
        ("generations", f"at most every {DEFAULT_TIMING.growth_interval:g} s,"),
        ("generations", f"for at most {DEFAULT_TIMING.growth_longest / 60:g} minutes"),
    ],
)
def test_the_concepts(page: str, sentence: str) -> None:
    assert sentence in " ".join((DOCS / "concepts" / f"{page}.md").read_text().split())
