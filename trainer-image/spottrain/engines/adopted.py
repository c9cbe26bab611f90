"""A model that another framework has spread, and computes with."""

from __future__ import annotations

from typing import Any

from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from spottrain.engines.ddp import settle_buckets
from spottrain.engines.engine import MakeOptimizer
from spottrain.engines.native import load_named_state, named_state


class AdoptedEngine:
    """Implements Engine for loops that are not this library's: its state alone, as the framework calls
    backward, clips and updates by itself."""

    _model: nn.Module

    def __init__(self, optimizer: Optimizer) -> None:
        self._optimizer = optimizer

    @staticmethod
    def check(strategy: str, model: nn.Module) -> None:
        """Raises ValueError where the job wants another strategy than the framework has taken."""
        if any(isinstance(module, FSDPModule) for module in model.modules()):
            taken = "fsdp"
        elif isinstance(model, DistributedDataParallel):
            taken = "ddp"
        else:
            return  # one rank alone, which frameworks leave as it is
        if strategy not in ("auto", taken):
            raise ValueError(
                f"the job's strategy is {strategy}, but the framework has spread the model as {taken}; set the "
                "framework's strategy in its own arguments, and the job's to the same or to auto"
            )

    def wrap(self, model: nn.Module, optimizer: MakeOptimizer) -> tuple[nn.Module, Optimizer]:
        self._model = model
        # DDP that looks for unused parameters leaves its buckets as they are.
        if isinstance(model, DistributedDataParallel) and not model.find_unused_parameters:
            settle_buckets(model, model.module)
        return model, self._optimizer

    def begin_micro_batch(self, *, is_last: bool) -> None:
        """The framework's business."""

    def backward(self, loss: Any) -> None:
        """Not called: the framework has its own."""
        raise RuntimeError("an adopted model's gradients are computed by its framework; call its own backward")

    def update(self) -> None:
        """The framework has done it."""

    def gradients_are_finite(self) -> bool:
        """The framework's business: they may be scaled for fp16, where it is usual that they aren't."""
        return True

    def discard(self) -> None:
        """Without gradients, the update that the framework goes on to make changes nothing."""
        self._optimizer.zero_grad(set_to_none=True)

    def state(self) -> dict[str, Any]:
        return named_state(self._model, self._optimizer)

    def load_state(self, state: dict[str, Any]) -> None:
        load_named_state(self._model, self._optimizer, state)
