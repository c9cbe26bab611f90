"""Optimizers of all kinds under every strategy, on real ranks on gloo.

They train as a plain loop does, also if the first step is skipped, and resume exactly, also at another world size.
Otherwise they end with a sentence after the first update, at the latest.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from forked_ranks import forked_ranks, rank_environments
from optimizer_kinds import KINDS

pytestmark = pytest.mark.timeout(400)

SCRIPT = Path(__file__).with_name("optimizers_script.py")
STRATEGIES = ["ddp", "fsdp", "deepspeed 1", "deepspeed 3"]
ZERO = STRATEGIES[2:]
_CUT = "cannot be saved if parameters are sharded; use another optimizer, or the strategy ddp."
# What the refusals say, by optimizer and strategy.
REFUSED = {
    ("Adafactor", "fsdp"): "torch's Adafactor can't step sharded parameters",
    **{
        (kind, strategy): f"The optimizer {kind} computes with each tensor as a whole, and ZeRO"
        for kind in ("Adafactor", "Prodigy", "Lamb", "MuonWithAuxAdam", "Soap")
        for strategy in ZERO
    },
    **{("LBFGS", strategy): "the optimizer LBFGS computes the loss again in its step" for strategy in STRATEGIES},
    **{
        ("ZeroRedundancyOptimizer", strategy): "The optimizer ZeroRedundancyOptimizer doesn't give its state"
        for strategy in STRATEGIES
    },
    (
        "Halving groups",
        "deepspeed 3",
    ): "The optimizer Halving counts its steps by itself (calls)",
    **{("HalfMomentum", strategy): "The optimizer's state 'moments.first' of shape" for strategy in ZERO},
    ("Soap", "fsdp"): "The optimizer's state 'GG.0' of shape",
    **{("EightBits", strategy): "The optimizer's state 'momentum' of shape" for strategy in STRATEGIES[1:]},
    **{("Blockwise", strategy): "The optimizer's state 'absmax' of shape" for strategy in STRATEGIES[1:]},
    **{("Galore", strategy): "The state at 'optimizer.state.scale.projector' is" for strategy in STRATEGIES},
    (
        "OfRank",
        "ddp",
    ): "Rank 1 has another optimizer.state.layers.0.",
}
# This one exchanges plain weights by itself.
CASES = [(kind, strategy) for kind in KINDS for strategy in (["ddp"] if kind == "OfRank" else STRATEGIES)]


class Results:
    """What two ranks made of each case, and what one rank made of their commits."""

    def __init__(self, fork: Any, folder: Path) -> None:
        self._folder = folder
        self.of_two = self._run(fork, 2, CASES, begins=True)
        self.of_one = self._run(fork, 1, [each for each in CASES if each not in REFUSED], begins=False)

    def _run(
        self, fork: Any, world_size: int, cases: list[tuple[str, str]], *, begins: bool
    ) -> dict[str, dict[str, Any]]:
        result = self._folder / f"{world_size}.json"
        common = {"folder": str(self._folder), "result": str(result), "begins": begins}
        settings = [
            {"environment": environment, "cases": cases, **common} for environment in rank_environments(world_size)
        ]
        with forked_ranks(fork, SCRIPT, settings, seconds=300):
            pass
        found: dict[str, dict[str, Any]] = json.loads(result.read_text())
        return found


@pytest.fixture(scope="module")
def results(fork: Any, tmp_path_factory: pytest.TempPathFactory) -> Results:
    return Results(fork, tmp_path_factory.mktemp("optimizers"))


@pytest.mark.parametrize(("kind", "strategy"), CASES)
def test_it_trains_and_resumes_as_a_plain_loop_does_or_is_refused(kind: str, strategy: str, results: Results) -> None:
    found = results.of_two[f"{kind}, {strategy}"]
    assert "error" not in found, found["error"]
    if (kind, strategy) in REFUSED:
        assert found.get("refused", str(found)).startswith(REFUSED[kind, strategy])
        return
    for each in (found, results.of_one[f"{kind}, {strategy}"]):
        assert each == {"differs": [], "far": []}
