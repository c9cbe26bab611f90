"""Every awkward model under every engine and in every framework's loop, drained and resumed at 1, 2 and 3 ranks.

What is trained is what a plain loop of a single process trains, or the run ends with a sentence at the start.
"""

from __future__ import annotations

import json
from functools import cache, partial
from pathlib import Path
from typing import Any

import pytest
import torch

from awkward_models import MODELS, train_plainly
from forked_ranks import forked_ranks, rank_environments

pytestmark = pytest.mark.timeout(600)

SCRIPT = Path(__file__).with_name("awkward_script.py")
# A case is in two of them, one after the other: it shrinks or grows. With a strategy for each, it is in all of them.
WORLDS = (2, 1, 3)
LOOPS = (
    *("ddp", "fsdp", "fsdp kept", "zero 0", "zero 1", "zero 2", "zero 3"),
    *("transformers", "lightning", "accelerate", "accelerate fsdp kept"),
)
# One after the other: each world has another strategy.
IN_TURNS = ("ddp, zero 2, fsdp", "zero 3, fsdp kept, zero 1")
READ_BY_ALL = ("buffers", "tied", "frozen", "unused", "scalars", "averaged")
SEVERAL_TYPES = "The model's parameters are of several types (offset of torch.float64 and blocks.0.weight of"
REFUSED: dict[tuple[str, str], str] = {
    # Under ZeRO the layer that is never used was updated as all others were, under FSDP2 it was not.
    ("unused", "zero 3, fsdp kept, zero 1"): "The optimizer's state 'step' of blocks.0.weight differs from that of",
    ("doubles", "zero 0"): "The parameter offset is of torch.float64, which DeepSpeed can't train.",
    **{("doubles", f"zero {stage}"): SEVERAL_TYPES for stage in (1, 2, 3)},
}
# ZeRO updates all parameters as one, and AdamW's decay changes those without a gradient, too.
DECAYED_BY_ZERO = ("never.weight", "never.bias")
# Callbacks of these would update the average, as a script's loop does.
WITHOUT_LOOP_OF_THEIRS = {"averaged": ("transformers", "lightning")}
CASES = [
    (model, loop)
    for model in MODELS
    for loop in (*LOOPS, *(IN_TURNS if model in READ_BY_ALL else ()))
    if loop not in WITHOUT_LOOP_OF_THEIRS.get(model, ())
]
# By their numbers in WORLDS. Each model has an odd number of cases, so that each loop grows with half of the models.
WORLDS_OF = {
    case: (0, 1, 2) if case[1] in IN_TURNS else (number % 2, number % 2 + 1) for number, case in enumerate(CASES)
}


@pytest.fixture(scope="module")
def runs(fork: Any, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[dict[str, dict[str, str]]]]:
    """The folder of the trained models, and by world and rank what went wrong."""
    folder = tmp_path_factory.mktemp("awkward")
    found = []
    for number, world_size in enumerate(WORLDS):
        settings = {
            "cases": [
                [*case, worlds.index(number), len(worlds)] for case, worlds in WORLDS_OF.items() if number in worlds
            ],
            "folder": str(folder),
            "result": str(folder / "result"),
        }
        ranks = [{"environment": environment, **settings} for environment in rank_environments(world_size)]
        with forked_ranks(fork, SCRIPT, ranks, seconds=300):
            pass
        found += [json.loads((folder / f"result-{rank}").read_text()) for rank in range(world_size)]
    return folder, found


@pytest.mark.parametrize(("model", "loop"), CASES)
def test_it_trains_what_a_plain_loop_trains_or_is_refused(
    model: str, loop: str, runs: tuple[Path, list[dict[str, dict[str, str]]]]
) -> None:
    folder, of_ranks = runs
    said = [rank.get(f"{model}: {loop}", {}) for rank in of_ranks]
    for each in said:
        assert "error" not in each, each["error"]
    if (refusal := REFUSED.get((model, loop))) is not None:
        assert refusal in {each["refused"][: len(refusal)] for each in said if each}
        return
    assert said == [{}] * len(said)
    trained = torch.load(folder / model / f"{loop}.pt", weights_only=True)
    wanted = {("model." if loop == "lightning" else "") + name: value for name, value in plain(model, loop).items()}
    assert trained.keys() == wanted.keys()
    for name, value in wanted.items():
        if "zero" in loop and loop != "zero 0" and name in DECAYED_BY_ZERO:
            continue
        torch.testing.assert_close(trained[name], value, rtol=1e-4, atol=1e-5, msg=partial("{}: {}".format, name))


def plain(model: str, loop: str) -> dict[str, torch.Tensor]:
    return _plain(model, tuple(WORLDS[number] for number in WORLDS_OF[model, loop]))


@cache
def _plain(model: str, worlds: tuple[int, ...]) -> dict[str, torch.Tensor]:
    return train_plainly(model, worlds)
