"""Loops of scripts' own on ranks that differ: they end with a sentence on all ranks, or differ without harm.

Real ranks on gloo show it.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from forked_ranks import forked_ranks, rank_environments

# What ranks 0 and 1 are refused.
OTHER = "the ranks attach different things: rank 0 has"
REFUSED = {
    "less data": (
        "another rank has left the loop after step 4, and rank 0 has gone on. Let all ranks make the same number of",
        "rank 1 has left the loop after step 4, and other ranks go on. Let all ranks make the same number of steps",
    ),
    "left early": ("another rank has left the loop after step 2,", "rank 1 has left the loop after step 2,"),
    "caught": ("another rank has left the loop after step 4,", "rank 1 has left the loop after step 4,"),
    "other names": (f"{OTHER} of_0 (list) where rank 1 has of_1 (list)",) * 2,
    "other kinds": (f"{OTHER} seen (list) where rank 1 has seen (int)",) * 2,
    "other shapes": ("Rank 1 has another factor",) * 2,
    "outside": ("factor is spread over a mesh without rank 1, and the job has 2 ranks; make the mesh of all",) * 2,
    "saved with another shape": (
        "The checkpoint at step 2 does not fit this model and strategy: 'factor' is float32 [2] in the",
    )
    * 2,
}
ACCEPTED = ("a rank ahead", "taught", "prepared", "attached", "prepared again", "waited for", "saved")
EVALUATED = ("evaluated", "evaluated by epoch")

SCRIPT = Path(__file__).with_name("attach_script.py")


@pytest.fixture(scope="module")
def ranks(fork: Any, tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, dict[str, str]]]:
    """By rank and case, what was refused or went wrong."""
    folder = tmp_path_factory.mktemp("attached")
    result = folder / "result"
    settings = [
        {"environment": environment, "folder": str(folder), "result": str(result)}
        for environment in rank_environments(2)
    ]
    with forked_ranks(fork, SCRIPT, settings):
        pass
    return [json.loads(Path(f"{result}-{rank}").read_text()) for rank in range(2)]


@pytest.mark.parametrize("case", ACCEPTED)
def test_ranks_may_be_at_different_places_and_a_run_be_resumed_in_another_way(
    case: str, ranks: list[dict[str, dict[str, str]]]
) -> None:
    for rank in ranks:
        assert case not in rank, rank[case]


@pytest.mark.parametrize("case", EVALUATED)
def test_a_notice_in_an_evaluation_commits_the_step_before_meanwhile(
    case: str, ranks: list[dict[str, dict[str, str]]]
) -> None:
    for rank in ranks:
        assert case not in rank, rank[case]


@pytest.mark.parametrize("case", REFUSED)
def test_what_differs_is_refused_on_all_ranks(case: str, ranks: list[dict[str, dict[str, str]]]) -> None:
    for rank, sentence in zip(ranks, REFUSED[case], strict=True):
        assert rank[case].get("refused", str(rank[case])).startswith(sentence), rank[case]
