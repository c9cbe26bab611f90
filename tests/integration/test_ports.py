"""Public scripts, ported: what was drained or lost trains as what was not, on as many ranks and on another number.

The scripts are in examples/ports, and docs/ports.md has what they need. Real ranks on gloo.
"""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from forked_ranks import forked_ranks, rank_environments

pytestmark = pytest.mark.timeout(600)

SCRIPT = Path(__file__).with_name("port_script.py")
# By script, the settings of its job.
PORTS: dict[str, dict[str, Any]] = {
    "diffusers_text_to_image": {"global_batch": 10, "micro_batch": 10},
    "diffusers_dreambooth": {"global_batch": 5},
    "trl_dpo": {"global_batch": 7},
}
# Others draw random numbers or an order that their plain form draws otherwise.
COMPARABLE = ("trl_dpo",)
WORLDS = {"plain": 1, "alone": 1, "two": 2, "three": 3}
DRAINED, LOST = {"event": "notice", "after": 3}, {"event": "loss", "after": 5}


def runs_of(name: str, folder: Path, world: str) -> list[dict[str, Any]]:
    """What one script does in a world: runs of a folder are generations of one job."""

    def of(job: str, **how: Any) -> dict[str, Any]:
        return {"name": name, "folder": str(folder / name / job), "form": "ported", **PORTS[name], **how}

    match world:
        case "plain":
            return [of("plain", form="plain")] if name in COMPARABLE else []
        case "alone":
            return [of("alone")]
        case "two":
            return [
                of("undisturbed"),
                *(of("drained", **DRAINED), of("drained")),
                *(of("lost", **LOST), of("lost")),
                of("moved", **DRAINED),
            ]
        case _:
            return [of("moved")]


@pytest.fixture(scope="module")
def trained(fork: Any, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of what was trained."""
    folder = tmp_path_factory.mktemp("ports")
    for world, world_size in WORLDS.items():
        runs = [each for name in PORTS for each in runs_of(name, folder, world)]
        settings = {"runs": runs, "result": str(folder / "result")}
        ranks = [{"environment": environment, **settings} for environment in rank_environments(world_size)]
        with forked_ranks(fork, SCRIPT, ranks, seconds=300):
            pass
        for rank in range(world_size):
            assert json.loads((folder / f"result-{rank}").read_text()) == {}
    return folder


def tensors(folder: Path, name: str, job: str) -> dict[str, torch.Tensor]:
    found = torch.load(folder / name / job / "trained.pt", weights_only=True)
    return {f"{part}.{key}": value for part, state in found.items() for key, value in state.items()}


@pytest.mark.parametrize("job", ["drained", "lost"])
@pytest.mark.parametrize("name", PORTS)
def test_a_resumed_script_trains_the_same_to_the_bit(name: str, job: str, trained: Path) -> None:
    found, wanted = tensors(trained, name, job), tensors(trained, name, "undisturbed")
    assert found.keys() == wanted.keys()
    for key, value in wanted.items():
        assert torch.equal(found[key], value), key


ELSEWHERE = [
    *((name, job, "alone") for name in PORTS for job in ("undisturbed", "moved")),
    *((name, "alone", "plain") for name in COMPARABLE),
]


@pytest.mark.parametrize(("name", "job", "wanted"), ELSEWHERE)
def test_a_script_trains_the_same_but_for_rounding(name: str, job: str, wanted: str, trained: Path) -> None:
    """On another number of ranks, and without the library."""
    found, expected = tensors(trained, name, job), tensors(trained, name, wanted)
    assert found.keys() == expected.keys()
    for key, value in expected.items():
        torch.testing.assert_close(found[key], value, rtol=1e-4, atol=1e-5, msg=partial("{}: {}".format, key))
