"""The interface between the step loop and PyTorch's ways to spread a model."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import nn
from torch.optim import Optimizer

from spottrain.data.batch import BatchPlan
from spottrain_api.settings.training import DeepSpeedConfig, FsdpConfig

MakeOptimizer = Callable[[nn.Module], Optimizer]


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineConfig:
    """What engines need to know.

    Attributes:
        device: Device of this rank.
        plan: How ranks share the batch.
        local_world_size: Number of ranks on each node.
        precision: In which the model computes.
        clip_grad_norm: Largest norm of the whole gradient. None: gradients are not clipped.
        wrap: Classes of modules that are gathered as one. None: the engine chooses.
        fsdp: The job's settings of FSDP.
        deepspeed: The job's settings of DeepSpeed.
        deepspeed_config: The script's own DeepSpeed JSON, as content or path.
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


class SavedState(Protocol):
    """The state of models and optimizers in a commit."""

    def state(self) -> dict[str, Any]:
        """Model and optimizer in the form that DCP expects, with their shards.

        Names are those of the parameters before the model was spread, so that the state fits any world size. It
        changes nothing: an optimizer that has no state yet has none in a commit.
        """
        ...

    def room(self, saved: dict[str, Any]) -> dict[str, Any]:
        """A state to load a commit into, with the values and the tensors that the commit holds.

        Args:
            saved: The state in the commit, with a Described in the place of each tensor.

        Raises:
            CheckpointMismatch: The commit doesn't fit a model or optimizer.
        """
        ...

    def try_load(self) -> None:
        """Try whether a commit of the present state could be loaded, without a change of it.

        Raises UnsupportedState.
        """
        ...

    def frozen(self) -> set[str]:
        """Names of the tensors in `state()` that are not trained: keys that lead to them, joined by dots."""
        ...

    def state_in_use(self) -> dict[str, Any]:
        """As `state()`, while another thread may run the model forward and backward."""
        ...

    def frozen_in_use(self) -> set[str]:
        """As `frozen()`, while another thread may run the model forward and backward."""
        ...

    def changing(self) -> dict[str, dict[str, Any]]:
        """What a forward pass may change of `state()`: buffers and extra states of each model, by their names."""
        ...

    def beside(self) -> Sequence[torch.Tensor]:
        """Tensors in `state()` that no optimizer trains, and that a script changes itself, such as an average's."""
        ...

    def load_state(self, state: dict[str, Any]) -> None:
        """Use a commit that was loaded into the `room()` of this engine. A collective."""
        ...


class Engine(SavedState, Protocol):
    """What the step loop does with models and optimizers on the ranks of the default process group."""

    def begin_micro_batch(self, *, is_last: bool) -> None:
        """Called before each forward pass. Gradients have to be averaged only after the last one of a step."""
        ...

    def backward(self, loss: torch.Tensor) -> None:
        """Add the gradients of a micro-batch's loss, a scalar that is weighted already."""
        ...

    def update(self) -> None:
        """Clip the gradients, step the optimizer and clear the gradients. A collective."""
        ...

    def update_average(self, average: nn.Module, source: nn.Module, decay: float) -> None:
        """Let `average`, a part of the model that isn't trained, follow `source`. A collective, between updates.

        Raises:
            UserError: They are no such parts, or the strategy keeps the average in a precision that loses small
                changes.
        """
        ...

    def gradients_are_finite(self) -> bool:
        """Whether all gradients of the step are finite; the same on all ranks.

        Called before the gradients are used. A collective.
        """
        ...

    def discard(self) -> None:
        """Clear the gradients, and do nothing else: called instead of `update`. A collective."""
        ...

    def model_state(self) -> dict[str, Any]:
        """The model's part of `state()`."""
        ...


class SpreadingEngine(Engine, Protocol):
    """Spreads a model over the ranks, and optimises it there.

    Gradients are averaged over the ranks. Weights are optimised and saved in fp32. The model computes in
    `EngineConfig.precision`, and returns fp32.
    """

    def wrap(self, model: nn.Module, optimizer: MakeOptimizer) -> tuple[nn.Module, Optimizer]:
        """Spread the model and make its optimizer. Called once, before all else; a collective.

        Returns:
            The model to call in forward, and the optimizer for schedules.
        """
        ...
