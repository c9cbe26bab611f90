"""Loops as people write them train the same at any number of ranks as a plain loop of a single process.

Each world is drained after two steps, and the next one resumes.
"""

from __future__ import annotations

import json
from functools import cache, partial
from pathlib import Path
from typing import Any

import pytest
import torch

from forked_ranks import forked_ranks, rank_environments
from people_loops import LOOPS

pytestmark = pytest.mark.timeout(600)

SCRIPT = Path(__file__).with_name("loops_script.py")
CASES = {
    (2, 3, 1): [
        *(f"contrastive: {engine}" for engine in ("ddp", "fsdp", "zero 1", "zero 3")),
        *("contrastive with idle ranks: ddp", "gan: ddp", "q learning: ddp", "actor and critic: ddp"),
        *("carried state: ddp", "epochs: ddp", "epochs with idle ranks: ddp", "closure: ddp"),
        *("spread: ddp", "spread: fsdp"),
        *("contrastive, attached: ddp", "contrastive, attached, with idle ranks: ddp"),
    ],
    (4, 2, 2): ["mesh: ddp"],
}
Runs = tuple[Path, list[dict[str, dict[str, str]]]]


@pytest.fixture(scope="module")
def runs(fork: Any, tmp_path_factory: pytest.TempPathFactory) -> Runs:
    """The folder of what was trained, and by world and rank what went wrong."""
    folder = tmp_path_factory.mktemp("loops")
    found = []
    for worlds, cases in CASES.items():
        for world_size in worlds:
            settings = {"cases": cases, "folder": str(folder), "result": str(folder / "result")}
            ranks = [{"environment": environment, **settings} for environment in rank_environments(world_size)]
            with forked_ranks(fork, SCRIPT, ranks, seconds=300):
                pass
            found += [json.loads((folder / f"result-{rank}").read_text()) for rank in range(world_size)]
    return folder, found


@pytest.mark.parametrize("case", [case for cases in CASES.values() for case in cases])
def test_it_trains_what_a_plain_loop_trains(case: str, runs: Runs) -> None:
    folder, of_ranks = runs
    for each in of_ranks:
        assert "error" not in each.get(case, {}), each[case]["error"]
    assert [each.get(case, {}) for each in of_ranks] == [{}] * len(of_ranks)
    trained = torch.load(folder / f"{case}.pt", weights_only=True)
    wanted = plain(case.split(": ")[0])
    assert trained.keys() == wanted.keys()
    for name, value in wanted.items():
        torch.testing.assert_close(trained[name], value, rtol=1e-4, atol=1e-5, msg=partial("{}: {}".format, name))


@cache
def plain(loop: str) -> dict[str, Any]:
    return dict(LOOPS[loop].plain())
