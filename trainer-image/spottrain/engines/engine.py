"""The seam between the step loop and PyTorch's ways to spread a model."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import nn
from torch.optim import Optimizer

from spottrain.data.batch import BatchPlan
from spottrain_api.contract import DeepSpeedConfig, FsdpConfig, Sharding

# Values of FsdpConfig.sharding.
FULL, HYBRID = Sharding.FULL.value, Sharding.HYBRID.value

MakeOptimizer = Callable[[nn.Module], Optimizer]


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineConfig:
    """What engines need to know.

    `wrap`: classes of modules that are gathered as one, None to choose. `clip_grad_norm`: the largest norm of the
    whole gradient, None not to clip. `fsdp` and `deepspeed` are what the job says about these, `deepspeed_config` is
    the script's own JSON or its path. `local_world_size` is the number of ranks on each node.
    """

    device: torch.device
    plan: BatchPlan
    local_world_size: int = 1
    precision: torch.dtype = torch.float32
    clip_grad_norm: float | None = None
    wrap: Collection[type[nn.Module]] | None = None
    fsdp: FsdpConfig = FsdpConfig()
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

    def gradients_are_finite(self) -> bool:
        """Whether those of the whole step are, before they are used; the same on all ranks. A collective."""
        ...

    def discard(self) -> None:
        """Instead of `update`: clear the gradients, and nothing else. A collective."""
        ...

    def state(self) -> dict[str, Any]:
        """Model and optimizer as DCP wants them, sharded as they are, by the names that parameters had before
        they were spread; so it fits any world size."""
        ...

    def frozen(self) -> set[str]:
        """Names, as `state()` has them under "model", of the parameters that aren't trained."""
        ...

    def load_state(self, state: dict[str, Any]) -> None:
        """Take over what was loaded into a `state()` of this engine. A collective."""
        ...
