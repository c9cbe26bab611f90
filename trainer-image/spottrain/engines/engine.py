"""The seam between the step loop and PyTorch's ways to spread a model, and the choice among them."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import nn

# Below, every rank can hold parameters, gradients and Adam's two moments in fp32 (8 GB), and replicas need
# less communication than shards. It depends on the model alone, so that all generations choose the same.
AUTO_SHARD_PARAMETERS = 500_000_000


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineConfig:
    """What engines need to know. `wrap`: classes of modules that are gathered as one, None to choose."""

    device: torch.device
    precision: torch.dtype = torch.float32
    wrap: Collection[type[nn.Module]] | None = None
    reshard_after_forward: bool = True


class Engine(Protocol):
    """Spreads a model over the ranks of the default process group.

    Gradients are averaged over the ranks. Parameters stay in fp32; computation is in `EngineConfig.precision`
    and what the model returns is fp32 again. Checkpoints need nothing of an engine: its parameters are
    tensors or DTensors, which PyTorch's state dict API knows by the names they had before.
    """

    def wrap(self, model: nn.Module) -> nn.Module:
        """The model to call in forward. Afterwards the parameters are those to optimise."""
        ...

    def begin_micro_batch(self, *, is_last: bool) -> None:
        """Called before each forward; only after the last one of a step have gradients to be averaged."""
        ...


def choose_engine(strategy: str, model: nn.Module, config: EngineConfig) -> Engine:
    """The engine of that strategy (auto, ddp, fsdp). Raises ValueError, with a sentence, for any other."""
    from spottrain.engines.ddp import DdpEngine
    from spottrain.engines.fsdp import FsdpEngine

    if strategy == "auto":
        num_parameters = sum(parameter.numel() for parameter in model.parameters())
        strategy = "fsdp" if num_parameters >= AUTO_SHARD_PARAMETERS else "ddp"
    match strategy:
        case "ddp":
            return DdpEngine(config)
        case "fsdp":
            return FsdpEngine(config)
        case _:
            raise ValueError(f"strategy {strategy!r} is unknown; use auto, ddp or fsdp")
