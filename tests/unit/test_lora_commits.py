"""A LoRA run of a model that is large beside its adapters, through the step loop."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn

from lora_runs import ADAPTER_AND_OPTIMIZER_BYTES, LAYERS, WIDTH, adapted, committed_bytes, train

BASE_BYTES = 4 * LAYERS * WIDTH * (WIDTH + 1)


pytestmark = pytest.mark.usefixtures("world_of_its_own")


def pretrained(seed: int = 1) -> nn.Module:
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        layers = [nn.Linear(WIDTH, WIDTH) for _ in range(LAYERS)]
        head = nn.Linear(WIDTH, WIDTH, bias=False)
        head.weight = layers[0].weight  # tied
        return nn.Sequential(*layers, head)


@pytest.mark.parametrize("strategy", ["ddp", "fsdp"])
def test_from_the_second_commit_on_a_lora_run_commits_adapters_and_optimizer(
    strategy: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    uri = f"file://{tmp_path}/checkpoints"
    train(uri, adapted(pretrained()), 2, strategy)
    sizes = committed_bytes(uri)
    assert sizes[1] > BASE_BYTES
    assert sizes[2] <= 1.05 * ADAPTER_AND_OPTIMIZER_BYTES
    assert "differ" not in caplog.text

    # The script brings another base from now on: what was committed replaces it, and is not written again.
    resumed = train(uri, adapted(pretrained(seed=2)), 3, strategy)
    assert "Weights that the script doesn't train differ from those in the checkpoint at step 2" in caplog.text
    assert committed_bytes(uri)[3] <= 1.05 * ADAPTER_AND_OPTIMIZER_BYTES
    caplog.clear()

    steady = train(f"file://{tmp_path}/steady", adapted(pretrained()), 3, strategy)
    assert "differ" not in caplog.text
    assert resumed.keys() == steady.keys()
    assert all(torch.equal(resumed[name], value) for name, value in steady.items())
