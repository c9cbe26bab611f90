"""How often gradients cross the network in a step.

The ranks are two nodes of two on gloo, with four micro-batches a step.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from forked_ranks import forked_ranks, rank_environments

SCRIPT = Path(__file__).with_name("collectives_script.py")


def fsdp(name: str, *, precision: str = "fp32", **case: Any) -> dict[str, Any]:
    """The settings of FSDP2 are those that are not the script's own."""
    own: dict[str, Any] = {key: case.pop(key) for key in ("checkpointed", "uses_parts") if key in case}
    return {"name": name, "strategy": "fsdp", "precision": precision, "fsdp": case, **own}


CASES = [
    fsdp("full"),
    fsdp("full in bf16", precision="bf16"),
    fsdp("full, in parts", uses_parts=True),
    fsdp("hybrid", sharding="hybrid"),
    fsdp("hybrid, recomputed", sharding="hybrid", checkpointed=True),
    fsdp("hybrid, kept gathered", sharding="hybrid", reshard_after_forward=False),
    fsdp("hybrid, in parts", sharding="hybrid", uses_parts=True),
    fsdp("hybrid in bf16", sharding="hybrid", precision="bf16"),
    fsdp("hybrid, on the CPU", sharding="hybrid", offload=True),
    fsdp("hybrid, on the CPU, in parts", sharding="hybrid", offload=True, uses_parts=True),
    {"name": "ddp", "strategy": "ddp"},
    *({"name": f"ZeRO {stage}", "strategy": "deepspeed", "zero_stage": stage} for stage in (0, 1)),
]
# Collectives of each backward with ranks of the other node. Under FSDP2 one compares the order of the blocks; at the
# last the two blocks and the head are reduced, and the scalar. ZeRO 1 compares which parameters were used.
LAST_ALONE = [1, 1, 1, 5]
COLLECTIVES = {
    "hybrid": LAST_ALONE,
    "hybrid, recomputed": LAST_ALONE,
    "hybrid, kept gathered": LAST_ALONE,
    "hybrid, in parts": LAST_ALONE,
    "hybrid in bf16": LAST_ALONE,
    "hybrid, on the CPU": LAST_ALONE,
    "hybrid, on the CPU, in parts": LAST_ALONE,
    "ddp": [0, 0, 0, 1],
    "ZeRO 0": [0, 0, 0, 1],
    "ZeRO 1": [0, 0, 0, 2],
}


@pytest.fixture(scope="module")
def results(fork: Any, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    result = tmp_path_factory.mktemp("collectives") / "result.json"
    settings = [
        {"environment": environment, "cases": CASES, "result": str(result)}
        for environment in rank_environments(4, local_world_size=2)
    ]
    with forked_ranks(fork, SCRIPT, settings):
        pass
    found: dict[str, Any] = json.loads(result.read_text())
    return found


@pytest.mark.parametrize("name", COLLECTIVES)
def test_gradients_cross_between_nodes_after_the_last_micro_batch_alone(name: str, results: dict[str, Any]) -> None:
    assert results[name]["collectives"] == [COLLECTIVES[name]] * 2


@pytest.mark.parametrize("name", COLLECTIVES)
def test_the_model_is_the_one_that_full_shards_train(name: str, results: dict[str, Any]) -> None:
    kind = next((kind for kind in (" in bf16", ", in parts") if name.endswith(kind)), "")
    tolerance = 1e-2 if kind == " in bf16" else 1e-5
    assert results[name]["outputs"] == pytest.approx(results[f"full{kind}"]["outputs"], abs=tolerance)


@pytest.mark.parametrize("kind", ["", ", in parts"])
def test_offload_changes_nothing_of_the_model(kind: str, results: dict[str, Any]) -> None:
    assert results[f"hybrid, on the CPU{kind}"]["outputs"] == results[f"hybrid{kind}"]["outputs"]
