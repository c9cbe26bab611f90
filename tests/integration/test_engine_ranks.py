"""FSDP2 in all its settings, on models as people write them.

Real ranks on gloo are compared with DDP and with a resumed run.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from forked_ranks import forked_ranks, rank_environments

# Some fifty trainings in a world.
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


@dataclass(frozen=True, kw_only=True, eq=False)
class World:
    """Cases that the same ranks train one after the other."""

    num_ranks: int
    num_local: int
    cases: tuple[dict[str, Any], ...]


WORLDS = [
    World(
        num_ranks=2,
        num_local=1,
        cases=(
            case("plain"),
            case("bf16, recomputed, on the CPU", precision="bf16", checkpointed=True, offload=True),
            # DDP doesn't take parameters that have no part in the loss.
            case("experts, and a buffer that follows the samples", "mixture", beside="fsdp"),
            case("replicas, batch norm", "cnn", strategy="ddp"),
            case("kept gathered", reshard_after_forward=False),
            case("batch norm in bf16", "cnn", precision="bf16"),
            case("encoder and decoder, recomputed", "encoder-decoder", checkpointed=True),
            case("lists in lists", "nested"),
            case("no lists", "rnn", precision="bf16"),
            case("replicas, recomputed", strategy="ddp", checkpointed=True),
        ),
    ),
    World(
        num_ranks=4,
        num_local=2,
        cases=(
            case("hybrid", sharding="hybrid"),
            case("hybrid in bf16, on the CPU", "nested", sharding="hybrid", precision="bf16", offload=True),
        ),
    ),
]
# torch's compiler takes most of a minute of processor.
COMPILED = World(
    num_ranks=2,
    num_local=1,
    cases=(case("compiled and recomputed", "layers", compiled=True, checkpointed=True),),
)
NUM_BLOCKS = {"gpt": 2, "cnn": 4, "encoder-decoder": 4, "nested": 4, "rnn": 2, "layers": 2, "mixture": 3}


Train = Callable[[World], dict[str, Any]]


@pytest.fixture(scope="module")
def train(fork: Any, tmp_path_factory: pytest.TempPathFactory) -> Train:
    """What came out of each case of a world, by its name.

    A world is trained once.
    """

    @cache
    def trained(world: World) -> dict[str, Any]:
        folder = tmp_path_factory.mktemp("world")
        result = folder / "result.json"
        settings = [
            {"environment": environment, "cases": world.cases, "folder": str(folder), "result": str(result)}
            for environment in rank_environments(world.num_ranks, local_world_size=world.num_local)
        ]
        with forked_ranks(fork, SCRIPT, settings, seconds=350):
            pass
        found: dict[str, Any] = json.loads(result.read_text())
        return found

    return trained


def each_case(*worlds: World, marks: Sequence[pytest.MarkDecorator] = ()) -> list[Any]:
    return [pytest.param(world, wanted, id=wanted["name"], marks=marks) for world in worlds for wanted in world.cases]


@pytest.mark.parametrize(
    ("world", "wanted"), [*each_case(*WORLDS), *each_case(COMPILED, marks=[pytest.mark.nightly])]
)
def test_it_trains_as_ddp_does_and_a_resume_changes_no_bit(
    world: World, wanted: dict[str, Any], train: Train
) -> None:
    result = train(world)[wanted["name"]]
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


def test_replicas_are_written_once(train: Train) -> None:
    """Weights and Adam's two moments, with little besides."""
    hybrid = train(WORLDS[-1])["hybrid"]
    assert hybrid["written_bytes"] < 1.15 * 12 * hybrid["num_parameters"]
