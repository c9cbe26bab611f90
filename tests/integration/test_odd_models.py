"""Models that no engine was made for, under every strategy.

They train as one rank does and resume exactly, also at a different world size, or they end with a sentence. Real
ranks on gloo run them.
"""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from commits import newest_commit
from forked_ranks import forked_ranks, rank_environments

# Three worlds, with some forty models in each.
pytestmark = [pytest.mark.nightly, pytest.mark.timeout(600)]

SCRIPT = Path(__file__).with_name("odd_models_script.py")
NATIVE = ["ddp", "fsdp"]
# Each rank uses other experts, which ZeRO doesn't take: see test_deepspeed_ranks.py.
STRATEGIES = {
    "experts": [*NATIVE, "deepspeed 0"],
    "balanced experts": NATIVE,
    "branches": ["ddp"],
    "embedding only": [*NATIVE, "deepspeed 2"],
    "convolutions": [*NATIVE, "deepspeed 1"],
    "tied": [*NATIVE, "deepspeed 2", "deepspeed 3"],
    "giant embedding": [*NATIVE, "deepspeed 2"],
    "adapted": [*NATIVE, "deepspeed 2"],
    "one scalar": [*NATIVE, "deepspeed 0", "deepspeed 3"],
    "eight bits": [*NATIVE, "deepspeed 1", "deepspeed 3"],
    "complex": NATIVE,
    "double": NATIVE,
    "norms in fp32": [*NATIVE, "deepspeed 0"],
    "layers in bf16": [*NATIVE, "deepspeed 3"],
    "no elements": [*NATIVE, "deepspeed 0", "deepspeed 2"],
}
REFUSED = {
    (
        "branches",
        "fsdp",
    ): "The ranks called different blocks of the model, or in a different order: rank 0 called branches.",
    ("complex", "deepspeed 0"): "The parameter filter is of torch.complex64, which DeepSpeed can't train.",
    ("double", "deepspeed 0"): "The parameter offset is of torch.float64, which DeepSpeed can't train.",
    (
        "norms in fp32",
        "deepspeed 2",
    ): "The model's parameters are of several types (tokens.weight of torch.float32 and",
    ("no elements", "deepspeed 3"): "The parameter prompts has no elements, which ZeRO 3 can't gather.",
}
TRAINED = [(model, strategy) for model, strategies in STRATEGIES.items() for strategy in strategies]
# Where bf16 is computed in, another order of sums is another rounding.
ROUGH = ("norms in fp32", "layers in bf16")


class Results:
    """Of all worlds: what was said, and what was committed."""

    def __init__(self, fork: Any, folder: Path) -> None:
        self._folder = folder
        self.of_two = self._run(fork, 2, begins=True, resumes=[2])
        self.of_one = self._run(fork, 1, begins=True, resumes=[2])
        self.back_at_two = self._run(fork, 2, begins=False, resumes=[1])

    def committed(self, model: str, strategy: str, run: str) -> dict[str, torch.Tensor]:
        return newest_commit(self._folder / model / strategy / run)[1]

    def _run(self, fork: Any, world_size: int, *, begins: bool, resumes: list[int]) -> dict[str, dict[str, Any]]:
        result = self._folder / "result.json"
        common = {"folder": str(self._folder), "result": str(result), "begins": begins, "resumes": resumes}
        cases = [*TRAINED, *(REFUSED if world_size == 2 and begins else [])]
        settings = [
            {"environment": environment, "cases": cases, **common} for environment in rank_environments(world_size)
        ]
        with forked_ranks(fork, SCRIPT, settings, seconds=500):
            pass
        found: dict[str, dict[str, Any]] = json.loads(result.read_text())
        result.unlink()
        return found


@pytest.fixture(scope="module")
def results(fork: Any, tmp_path_factory: pytest.TempPathFactory) -> Results:
    return Results(fork, tmp_path_factory.mktemp("odd"))


@pytest.mark.parametrize(("model", "strategy"), TRAINED)
def test_it_trains_as_one_rank_does_and_is_resumed_at_any_world_size(
    model: str, strategy: str, results: Results
) -> None:
    name = f"{model}, {strategy}"
    for found in (results.of_two, results.of_one, results.back_at_two):
        assert "error" not in found[name], found[name]["error"]
    rtol, atol = (3e-2, 5e-3) if model in ROUGH else (1e-4, 1e-5)
    wanted = results.of_one[f"{model}, ddp"]["losses"]
    assert len(set(wanted)) > 1
    for found in (results.of_two, results.of_one):
        assert found[name]["losses"] == pytest.approx(wanted, rel=rtol)

    steady = results.committed(model, strategy, "steady-2")
    resumed = results.committed(model, strategy, "resumed-2-2")
    assert resumed.keys() == steady.keys()
    assert all(torch.equal(resumed[name], value) for name, value in steady.items())
    alone = results.committed(model, strategy, "steady-1")
    assert_close(alone, steady, rtol, atol)
    assert_close(results.committed(model, strategy, "resumed-2-1"), alone, rtol, atol)
    assert_close(results.committed(model, strategy, "resumed-1-2"), steady, rtol, atol)


@pytest.mark.parametrize(("model", "strategy"), REFUSED)
def test_what_cannot_be_trained_so_ends_with_a_sentence(model: str, strategy: str, results: Results) -> None:
    result = results.of_two[f"{model}, {strategy}"]
    assert result.get("refused", str(result)).startswith(REFUSED[model, strategy])


def assert_close(found: dict[str, torch.Tensor], wanted: dict[str, torch.Tensor], rtol: float, atol: float) -> None:
    """But for buffers, as each rank's follow the samples that it has seen."""
    assert found.keys() == wanted.keys()
    for name, value in wanted.items():
        if not name.rpartition(".")[2].startswith(("running_", "num_batches", "seen")):
            torch.testing.assert_close(found[name], value, rtol=rtol, atol=atol, msg=partial("{}: {}".format, name))
