"""The seam between the step loop and PyTorch's ways to spread a model, and the choice among them."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import nn
from torch.optim import Optimizer

from spottrain.batch import BatchPlan
from spottrain_api.contract import DeepSpeedConfig

MakeOptimizer = Callable[[nn.Module], Optimizer]

# Below, every rank can hold parameters, gradients and Adam's two moments in fp32 (8 GB), and replicas need
# less communication than shards. It depends on the model alone, so that all generations choose the same.
AUTO_SHARD_PARAMETERS = 500_000_000


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineConfig:
    """What engines need to know. `wrap`: classes of modules that are gathered as one, None to choose.
    `clip_grad_norm`: the largest norm of the whole gradient, None not to clip. `deepspeed` is what the job says
    about DeepSpeed, `deepspeed_config` the script's own JSON or its path."""

    device: torch.device
    plan: BatchPlan
    precision: torch.dtype = torch.float32
    clip_grad_norm: float | None = None
    wrap: Collection[type[nn.Module]] | None = None
    reshard_after_forward: bool = True
    deepspeed: DeepSpeedConfig = DeepSpeedConfig()
    deepspeed_config: Mapping[str, Any] | str | Path | None = None


class Engine(Protocol):
    """Spreads a model over the ranks of the default process group, and optimises it there.

    Gradients are averaged over the ranks. The weights that are optimised and saved are in fp32; computation
    is in `EngineConfig.precision` and what the model returns is fp32 again.
    """

    def wrap(self, model: nn.Module, optimizer: MakeOptimizer) -> tuple[nn.Module, Optimizer]:
        """The model to call in forward, and the optimizer that schedules work on. Called once, first; a
        collective."""
        ...

    def begin_micro_batch(self, *, is_last: bool) -> None:
        """Called before each forward; only after the last one of a step have gradients to be averaged."""
        ...

    def backward(self, loss: torch.Tensor) -> None:
        """Add the gradients of a micro-batch's loss, which is weighted already."""
        ...

    def update(self) -> None:
        """Clip the gradients, step the optimizer and clear the gradients. A collective."""
        ...

    def state(self) -> dict[str, Any]:
        """Model and optimizer as DCP wants them, sharded as they are, by the names that parameters had before
        they were spread; so it fits any world size."""
        ...

    def load_state(self, state: dict[str, Any]) -> None:
        """Take over what was loaded into a `state()` of this engine. A collective."""
        ...


def choose_engine(strategy: str, model: nn.Module, config: EngineConfig) -> Engine:
    """The engine of that strategy (auto, ddp, fsdp, deepspeed). Raises ValueError, with a sentence, for any
    other, and where the engine's library is missing."""
    if strategy == "auto":
        num_parameters = sum(parameter.numel() for parameter in model.parameters())
        strategy = "fsdp" if num_parameters >= AUTO_SHARD_PARAMETERS else "ddp"
    engines: Mapping[str, Callable[[EngineConfig], Engine]] = {"ddp": _ddp, "fsdp": _fsdp, "deepspeed": _deepspeed}
    if strategy not in engines:
        raise ValueError(f"strategy {strategy!r} is unknown; use auto, ddp, fsdp or deepspeed")
    return engines[strategy](config)


# Imported when they are needed: torch's parts take their time, and DeepSpeed need not be installed.


def _ddp(config: EngineConfig) -> Engine:
    from spottrain.engines.ddp import DdpEngine

    return DdpEngine(config)


def _fsdp(config: EngineConfig) -> Engine:
    from spottrain.engines.fsdp import FsdpEngine

    return FsdpEngine(config)


def _deepspeed(config: EngineConfig) -> Engine:
    from spottrain.engines.deepspeed import DeepSpeedEngine

    return DeepSpeedEngine(config)
