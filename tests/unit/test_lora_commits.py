"""A LoRA run of a model that is large beside its adapters, through the step loop."""

from __future__ import annotations

from collections import OrderedDict
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import nn

from lora_runs import ADAPTER_AND_OPTIMIZER_BYTES, LAYERS, WIDTH, adapted, committed_bytes, train, with_lora
from spottrain.checkpoint.checkpointer import Checkpointer
from spottrain.checkpoint.format.head import read_head
from spottrain.checkpoint.loading.export import export
from spottrain.checkpoint.stores.uri import open_storage
from spottrain.engines.model_state import model_state
from spottrain.recovery.peft_adapters import peft_adapters

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
    assert "Values that aren't trained differ from those in the checkpoint at step 2" in caplog.text
    assert committed_bytes(uri)[3] <= 1.05 * ADAPTER_AND_OPTIMIZER_BYTES
    caplog.clear()

    steady = train(f"file://{tmp_path}/steady", adapted(pretrained()), 3, strategy)
    assert "differ" not in caplog.text
    assert resumed.keys() == steady.keys()
    assert all(torch.equal(resumed[name], value) for name, value in steady.items())


def exported(folder: Path, *, compiled: str = "nothing") -> dict[str, torch.Tensor]:
    """The adapters of two layers and a head, of which the script compiled a part."""
    layers = [nn.Sequential(OrderedDict(proj=nn.Linear(4, 4))) for _ in range(2)]
    if compiled == "layers":
        layers = [torch.compile(layer, backend="eager") for layer in layers]  # type: ignore[misc]
    model: nn.Module = nn.Sequential(OrderedDict(layers=nn.Sequential(*layers), head=nn.Linear(4, 4)))
    if compiled == "base":
        model = torch.compile(model, backend="eager")  # type: ignore[assignment]
    made = with_lora(model, 2, ["proj", "head"])
    if compiled == "model":
        made = torch.compile(made, backend="eager")  # type: ignore[assignment]
    storage = open_storage(f"file://{folder}/store")
    saver = Checkpointer(storage, generation=1, attempt_id="a", rank=0, world_size=1)
    saver.save({"model": model_state(made)}, step=1, extra={"peft": peft_adapters(made)})
    head = read_head(storage)
    assert head is not None
    assert head.newest is not None
    return load_file(export(storage, head.newest, folder / "adapters")[0])


@pytest.mark.parametrize("compiled", ["layers", "base", "model"])
def test_a_model_that_the_script_compiles_has_the_adapters_of_the_model_itself(compiled: str, tmp_path: Path) -> None:
    plain, found = exported(tmp_path / "plain"), exported(tmp_path / "compiled", compiled=compiled)
    assert "base_model.model.layers.0.proj.lora_A.weight" in plain
    assert found.keys() == plain.keys()
    assert all(torch.equal(found[name], value) for name, value in plain.items())
