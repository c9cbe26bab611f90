"""Base of PyTorch's own engines: parameters, optimizers and state dicts."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from spottrain.engines.buffers import SharedBuffers
from spottrain.engines.engine import EngineConfig, MakeOptimizer
from spottrain.engines.model_state import (
    frozen_names,
    load_model_state,
    model_state,
    share_parts,
    unwrapped,
    without_wrapper,
)
from spottrain.engines.optimizer_state import NamedOptimizer
from spottrain.engines.precision import weights_in_fp32
from spottrain.engines.step_agreement import StepAgreement
from spottrain.engines.trained import TrainedParameters
from spottrain.engines.used import UsedParameters


class NamedState:
    """Implements what `Engine` says of states, for a model with plain or sharded parameters and its optimizer."""

    _model: nn.Module
    _optimizer: Optimizer

    def _at_rest(self) -> nn.Module:
        """The model with its own parameters, which the optimizer has. Whatever reads or changes them takes it."""
        return self._model

    def state(self) -> dict[str, Any]:
        return {"model": self.model_state(), "optimizer": self._named_optimizer().state()}

    def room(self, saved: dict[str, Any]) -> dict[str, Any]:
        return {"model": self.model_state(), "optimizer": self._named_optimizer().room(saved["optimizer"])}

    def try_load(self) -> None:
        self._named_optimizer().try_load()

    def model_state(self) -> dict[str, Any]:
        return model_state(self._at_rest())

    def frozen(self) -> set[str]:
        return frozen_names(self._at_rest())

    def load_state(self, state: dict[str, Any]) -> None:
        load_model_state(self._at_rest(), state["model"])
        self._named_optimizer().load(state["optimizer"])

    def _named_optimizer(self) -> NamedOptimizer:
        """By the names that parameters had before they were spread."""
        named = without_wrapper(self._at_rest()).named_parameters()
        return NamedOptimizer(self._optimizer, {parameter: unwrapped(name) for name, parameter in named})


class NativeEngine(NamedState, ABC):
    """Implements Engine, except for how the model is spread."""

    def __init__(self, config: EngineConfig) -> None:
        """Raises ValueError for a precision that needs a loss scaler."""
        if config.precision is torch.float16:
            raise ValueError("precision fp16 needs the strategy deepspeed, which scales the loss; use bf16 or fp32")
        self._config = config

    def wrap(self, model: nn.Module, optimizer: MakeOptimizer) -> tuple[nn.Module, Optimizer]:
        if self._config.precision is not torch.float32:
            weights_in_fp32(model)
        self._model = self._spread(model)
        share_parts(self._model, self._config.device)
        self._buffers = SharedBuffers(without_wrapper(self._model))
        self._buffers.share()
        self._trained = TrainedParameters(without_wrapper(self._model))
        self._used = UsedParameters({each: name for name, each in without_wrapper(self._model).named_parameters()})
        self._watch(self._used)
        self._agreement = StepAgreement(self._buffers, self._used)
        self._optimizer = optimizer(self._model)
        return self._model, self._optimizer

    @abstractmethod
    def _spread(self, model: nn.Module) -> nn.Module:
        """The model to call in forward, with tensors or DTensors as parameters."""

    @abstractmethod
    def _watch(self, used: UsedParameters) -> None:
        """Make it note the gradients of all trained parameters."""

    @abstractmethod
    def begin_micro_batch(self, *, is_last: bool) -> None: ...

    def backward(self, loss: torch.Tensor) -> None:
        self._used.begin_pass()
        torch.autograd.backward(loss)

    def update(self) -> None:
        model = self._at_rest()
        self._agreement.reach()
        if self._config.clip_grad_norm is not None:
            nn.utils.clip_grad_norm_(model.parameters(), self._config.clip_grad_norm)
        self._optimizer.step()
        self._clear_gradients()
        self._buffers.share()

    def gradients_are_finite(self) -> bool:
        """Whether their norm is finite, which one bad element on any rank prevents."""
        gradients = [each.grad for each in self._at_rest().parameters() if each.grad is not None]
        norm = nn.utils.get_total_norm(gradients)
        return bool(torch.isfinite(norm.full_tensor() if isinstance(norm, DTensor) else norm))

    def discard(self) -> None:
        self._agreement.reach()
        self._clear_gradients()
        self._buffers.share()

    def _clear_gradients(self) -> None:
        self._optimizer.zero_grad(set_to_none=True)
        self._at_rest().zero_grad(set_to_none=True)  # clipping and checks include parameters that the optimizer lacks
