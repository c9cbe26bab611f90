"""FSDP2 in all its settings, on models as people write them.

Real ranks on gloo are compared with DDP and with a resumed run.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from forked_ranks import forked_ranks, rank_environments

# Some twenty trainings in each of two worlds.
pytestmark = pytest.mark.timeout(400)

SCRIPT = Path(__file__).with_name("engine_script.py")


def case(name: str, model: str = "gpt", **settings: Any) -> dict[str, Any]:
    """`settings` other than these are those of FSDP2."""
    own: dict[str, Any] = {"strategy": "fsdp", "precision": "fp32", "compiled": False, "checkpointed": False}
    own["beside"] = "ddp"
    return {
        "name": name,
        "model": model,
        **{key: settings.pop(key, default) for key, default in own.items()},
        "fsdp": settings,
    }


TWO_RANKS = [
    case("plain"),
    case("bf16, recomputed, on the CPU", precision="bf16", checkpointed=True, offload=True),
    case("kept gathered", reshard_after_forward=False),
    case("batch norm in bf16", "cnn", precision="bf16"),
    case("encoder and decoder, recomputed", "encoder-decoder", checkpointed=True),
    case("lists in lists", "nested"),
    # DDP doesn't take parameters that have no part in the loss.
    case("experts, and a buffer that follows the samples", "mixture", beside="fsdp"),
    case("no lists", "rnn", precision="bf16"),
    case("compiled and recomputed", "layers", compiled=True, checkpointed=True),
    case("replicas, recomputed", strategy="ddp", checkpointed=True),
    case("replicas, batch norm", "cnn", strategy="ddp"),
]
TWO_NODES_OF_TWO = [
    case("hybrid", sharding="hybrid"),
    case("hybrid in bf16, on the CPU", "nested", sharding="hybrid", precision="bf16", offload=True),
]
NUM_BLOCKS = {"gpt": 2, "cnn": 4, "encoder-decoder": 4, "nested": 4, "rnn": 2, "layers": 2, "mixture": 3}


def train(
    fork: Any, cases: list[dict[str, Any]], world_size: int, local_world_size: int, folder: Path
) -> dict[str, Any]:
    """What came out of each case, by its name."""
    result = folder / "result.json"
    settings = [
        {"environment": environment, "cases": cases, "folder": str(folder), "result": str(result)}
        for environment in rank_environments(world_size, local_world_size=local_world_size)
    ]
    with forked_ranks(fork, SCRIPT, settings, seconds=350):
        pass
    found: dict[str, Any] = json.loads(result.read_text())
    return found


@pytest.fixture(scope="module")
def results(fork: Any, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    two = train(fork, TWO_RANKS, 2, 1, tmp_path_factory.mktemp("two"))
    return two | train(fork, TWO_NODES_OF_TWO, 4, 2, tmp_path_factory.mktemp("four"))


@pytest.mark.parametrize("wanted", TWO_RANKS + TWO_NODES_OF_TWO, ids=lambda wanted: wanted["name"])
def test_it_trains_as_ddp_does_and_a_resume_changes_no_bit(wanted: dict[str, Any], results: dict[str, Any]) -> None:
    result = results[wanted["name"]]
    assert "error" not in result, result["error"]
    tolerance = 1e-5 if wanted["precision"] == "fp32" else 2e-2
    assert result["losses"] == pytest.approx(result["plain"], rel=tolerance)
    assert len(set(result["losses"])) > 1
    assert result["resumed"] == result["losses"]
    assert result["is_same"]
    assert result["is_exported"]
    assert result["num_blocks"] == NUM_BLOCKS[wanted["model"]]
    # Half the parameters for each of two ranks, also where there are two replicas of two ranks.
    share = 1.0 if wanted["strategy"] == "ddp" else 0.5
    assert result["share"] == pytest.approx(share, abs=0.02)


def test_replicas_are_written_once(results: dict[str, Any]) -> None:
    """Weights and Adam's two moments, with little besides."""
    hybrid = results["hybrid"]
    assert hybrid["written_bytes"] < 1.15 * 12 * hybrid["num_parameters"]
