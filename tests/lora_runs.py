"""LoRA runs through the step loop, of a base that is large beside its adapters."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor

import spottrain
from spottrain.checkpoint.format.head import HEAD_KEY, read_head
from spottrain.checkpoint.stores.uri import open_storage

WIDTH, LAYERS, RANK = 512, 4, 64
# The adapters of all layers, two matrices each, with AdamW's two moments.
ADAPTER_AND_OPTIMIZER_BYTES = 3 * 4 * LAYERS * 2 * WIDTH * RANK


def adapted(base: nn.Module) -> nn.Module:
    return with_lora(base, RANK, [str(number) for number in range(LAYERS)])


def with_lora(base: nn.Module, rank: int, modules: list[str]) -> nn.Module:
    """A model with adapters of these modules, the same each time."""
    from peft import LoraConfig, get_peft_model  # here, as collecting the tests would import torch's compiler

    with torch.random.fork_rng():
        torch.manual_seed(3)
        model: nn.Module = get_peft_model(base, LoraConfig(r=rank, target_modules=modules))
    return model


def train(uri: str, model: nn.Module, total: int, strategy: str) -> dict[str, torch.Tensor]:
    """The weights after step `total`; each step is committed."""
    with spottrain.session(
        strategy=strategy, global_batch=4, micro_batch=4, checkpoint_uri=uri, checkpoint_interval="1steps"
    ) as session:
        training = session.prepare(
            model,
            optimizer=lambda model: torch.optim.AdamW((p for p in model.parameters() if p.requires_grad), lr=0.01),
            dataset=[torch.full((WIDTH,), float(index)) for index in range(8)],
        )
        for step in training.steps(total=total):
            for batch in step.micro_batches():
                step.backward(training.model(batch).square().mean())
            step.update()
        return {name: whole(value).detach().clone() for name, value in training.model.named_parameters()}


def whole(value: Any) -> torch.Tensor:
    return value.full_tensor() if isinstance(value, DTensor) else value


def committed_bytes(uri: str) -> dict[int, int]:
    """By step, what each kept commit has added to the store, HEAD included."""
    storage = open_storage(uri)
    head = read_head(storage)
    assert head is not None
    size_of_head = len(storage.get(HEAD_KEY)[0])
    return {c.step: size_of_head + sum(size for _, size in storage.list(c.attempt)) for c in head.commits}
