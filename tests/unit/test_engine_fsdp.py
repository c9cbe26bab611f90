"""What FSDP2 shards of a model, and what it can't."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch import nn

from spottrain.data.batch import BatchPlan
from spottrain.engines.engine import EngineConfig
from spottrain.engines.fsdp import FsdpEngine, kept_whole
from spottrain.world.failures import UserError


class Block(nn.Module):
    """A block most of which is in bf16.

    It also has a norm in fp32, a frozen weight of eight bits, and parameters that have no parts.
    """

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4, dtype=torch.bfloat16)
        self.norm = nn.LayerNorm(4)
        self.frozen = nn.Parameter(torch.ones(4, dtype=torch.int8), requires_grad=False)
        self.scale = nn.Parameter(torch.tensor(1.0))
        self.none = nn.Parameter(torch.empty(0, 4))
        self.filter = nn.Parameter(torch.ones(9, dtype=torch.complex64))


def test_what_has_no_parts_or_another_type_stays_whole() -> None:
    model = nn.ModuleDict({"head": nn.Linear(4, 4), "block": Block()})
    names = {parameter: name for name, parameter in model.named_parameters()}
    whole = {names[parameter] for parameter in kept_whole([model["block"], model])}
    assert whole == {f"block.{name}" for name in ("norm.weight", "norm.bias", "scale", "none", "filter")}
    # Gathered with the head, most of it is in fp32.
    assert {names[parameter] for parameter in kept_whole([model])} == {
        *("block.linear.weight", "block.linear.bias", "block.scale", "block.none", "block.filter")
    }


def test_a_module_to_wrap_that_shares_a_parameter_is_refused_with_a_sentence() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 4))
    model[2].weight = model[0].weight
    config = EngineConfig(
        device=torch.device("cpu"), plan=BatchPlan(global_batch=1, micro_batch=1, world_size=1), wrap=[nn.Linear]
    )
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)  # type: ignore[attr-defined]
    try:
        with pytest.raises(UserError) as raised:
            FsdpEngine(config).wrap(model, lambda m: torch.optim.SGD(m.parameters()))
    finally:
        dist.destroy_process_group()
    assert str(raised.value) == (
        "The module 2 is to be gathered as one, as `wrap` says, but other modules use its parameter 0.weight too; "
        "leave Linear out of `wrap`, or use the strategy ddp."
    )


def test_weights_in_another_order_than_their_dimensions_are_trained() -> None:
    convolution = nn.Conv2d(3, 4, 3)
    convolution.weight.data = convolution.weight.to(memory_format=torch.channels_last)
    model = nn.Sequential(convolution, nn.Flatten())
    before = convolution.weight.detach().clone()
    config = EngineConfig(device=torch.device("cpu"), plan=BatchPlan(global_batch=1, micro_batch=1, world_size=1))
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)  # type: ignore[attr-defined]
    try:
        engine = FsdpEngine(config)
        spread, _ = engine.wrap(model, lambda m: torch.optim.SGD(m.parameters(), lr=0.1))
        assert torch.equal(engine.state()["model"]["0.weight"].full_tensor(), before)
        engine.begin_micro_batch(is_last=True)
        engine.backward(spread(torch.ones(1, 3, 3, 3)).sum())
        engine.update()
        assert torch.allclose(engine.state()["model"]["0.weight"].full_tensor(), before - 0.1)
    finally:
        dist.destroy_process_group()
