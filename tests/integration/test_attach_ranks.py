"""Loops of a script's own on ranks that differ: none waits longer than it has to. Real ranks on gloo show it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from forked_ranks import forked_ranks, rank_environments

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


def test_a_rank_that_is_ahead_does_not_wait_at_a_boundary(ranks: list[dict[str, dict[str, str]]]) -> None:
    for rank in ranks:
        assert "a rank ahead" not in rank, rank["a rank ahead"]
