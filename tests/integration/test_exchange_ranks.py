"""What ranks exchange: JSON, and nothing that runs code."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from forked_ranks import forked_ranks, rank_environments

SCRIPT = Path(__file__).with_name("exchange_script.py")
ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def folder(fork: Any, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What three ranks left."""
    folder = tmp_path_factory.mktemp("exchange")
    settings = [{"environment": environment, "folder": str(folder)} for environment in rank_environments(3)]
    with forked_ranks(fork, SCRIPT, settings):
        pass
    return folder


@pytest.mark.parametrize("rank", range(3))
def test_every_rank_gets_what_was_sent(folder: Path, rank: int) -> None:
    values = [{"größe": [1, None, 2.5]}, "", ["x" * 100_000]]
    assert json.loads((folder / f"{rank}.json").read_text()) == {
        "all_gather": values,
        "gather": values if rank == 0 else None,
        "broadcast": values[0],
        "scatter": values[rank],
        "union": ["0", "1", "2", "a"],
        "from rank 0": [0, "a"],
        "fenced": ["Fenced", "A newer one.", 7],
        "of one": ["ObjectNotFound", "There is no object 'HEAD' in the checkpoint store.", None],
        "of a store": ["StorageUnavailable", "It hangs.", None],
    }


def test_a_pickle_that_arrives_is_refused_and_not_run(folder: Path) -> None:
    for rank in (1, 2):
        assert (folder / f"refused-{rank}").read_text() == "executed: False"
    assert (folder / "executed").exists()  # by the ranks that unpickled it afterwards


@pytest.mark.parametrize(
    "line",
    [
        "import pickle",
        "import torch.distributed as dist; dist.all_gather_object([], 1)",
        "from torch.distributed import broadcast_object_list",
        "import torch; torch.load('x')",
    ],
)
def test_the_linter_refuses_pickles_in_what_is_shipped(line: str) -> None:
    ruff = [
        sys.executable,
        "-m",
        "ruff",
        "check",
        "--select=TID251",
        "--stdin-filename=trainer-image/spottrain/x.py",
        "-",
    ]
    found = subprocess.run(ruff, cwd=ROOT, input=f"{line}\n", capture_output=True, text=True)
    assert found.returncode == 1
    assert "TID251" in found.stdout
