"""The model checker: quick worlds, and a few of the seeded bugs.

`make explore` and `make explore-bugs` do the rest.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from pathlib import Path

import pytest

from explorer import bugs
from explorer.replay import Raised
from explorer.search import described, explore
from explorer.worlds import QUICK, WORLDS, world_of
from spottrain.checkpoint.errors import RankFailed, StorageUnavailable, error_to_json


@pytest.fixture(autouse=True)
def quiet() -> Iterator[None]:
    """Saves that fail are logged, and here many do."""
    logging.disable(logging.CRITICAL)
    yield
    logging.disable(logging.NOTSET)


@pytest.mark.parametrize("name", QUICK)
def test_nothing_is_wrong_in_any_state_of_a_quick_world(name: str) -> None:
    result = explore(world_of(QUICK[name]))
    assert result.found is None, described(result.found)
    assert result.complete
    assert result.ends > 0


def test_an_error_that_has_another_ranks_error_is_part_of_a_state() -> None:
    error = RankFailed(2, 1, error_to_json(StorageUnavailable("the store does not answer")))
    raised = Raised.of(error)
    assert len({raised, Raised.of(error)}) == 1
    assert str(raised.exception()) == str(error)
    assert raised.exception().args == error.args


def test_there_are_twenty_seeded_bugs_or_more() -> None:
    found = bugs.seeded()
    assert len(found) >= 20
    assert {bug.world for bug in found} <= WORLDS.keys()


@pytest.mark.parametrize("bug", bugs.seeded(), ids=lambda bug: bug.name)
def test_a_seeded_bug_is_a_patch_of_the_code_as_it_is(bug: bugs.Bug, tmp_path: Path) -> None:
    bugs.patched(bug, tmp_path)


@pytest.mark.parametrize("name", ["commit-before-manifest", "drain-is-assigned-as-stop"])
def test_a_seeded_bug_is_found(name: str) -> None:
    [bug] = [bug for bug in bugs.seeded() if bug.name == name]
    is_found, printed = bugs.hunt(bug)
    assert is_found, printed
    assert "  => " in printed
