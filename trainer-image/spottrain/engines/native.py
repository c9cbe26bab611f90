"""Base of PyTorch's own engines: parameters, optimizers and state dicts."""

from __future__ import annotations

from abc import ABC, abstractmethod

import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from spottrain.engines.buffers import SharedBuffers
from spottrain.engines.engine import EngineConfig, MakeOptimizer
from spottrain.engines.model_state import share_parts, without_wrapper
from spottrain.engines.named_state import MODEL, OPTIMIZER, NamedState
from spottrain.engines.own_numbers import watch_numbers
from spottrain.engines.precision import weights_in_fp32
from spottrain.engines.step_agreement import StepAgreement
from spottrain.engines.trained import TrainedParameters
from spottrain.engines.used import UsedParameters


class NativeEngine(NamedState, ABC):
    """Implements Engine, except for how the model is spread."""

    def __init__(self, config: EngineConfig) -> None:
        """Raises ValueError for a precision that needs a loss scaler."""
        if config.precision is torch.float16:
            raise ValueError("precision fp16 needs the strategy deepspeed, which scales the loss; use bf16 or fp32")
        self._config = config

    def spread(self, model: nn.Module) -> nn.Module:
        if self._config.precision is not torch.float32:
            weights_in_fp32(model)
        self._model = self._spread(model)
        share_parts(self._model, self._config.device)
        self._buffers = SharedBuffers(without_wrapper(self._model))
        self._buffers.share()
        return self._model

    def wrap(self, model: nn.Module, optimizer: MakeOptimizer) -> tuple[nn.Module, Optimizer]:
        self.spread(model)
        self._trained = TrainedParameters(without_wrapper(self._model))
        self._used = UsedParameters({each: name for name, each in without_wrapper(self._model).named_parameters()})
        self._watch(self._used)
        self._agreement = StepAgreement(self._buffers, self._used)
        self._optimizer = optimizer(self._model)
        watch_numbers(self._optimizer)
        self._models, self._optimizers = {MODEL: self._model}, {OPTIMIZER: self._optimizer}
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
        model = self._at_rest()[MODEL]
        self._agreement.reach()
        if self._config.clip_grad_norm is not None:
            nn.utils.clip_grad_norm_(model.parameters(), self._config.clip_grad_norm)
        self._optimizer.step()
        self._clear_gradients()
        self._buffers.share()

    def gradients_are_finite(self) -> bool:
        """Whether their norm is finite, which one bad element on any rank prevents."""
        gradients = [each.grad for each in self._at_rest()[MODEL].parameters() if each.grad is not None]
        norm = nn.utils.get_total_norm(gradients)
        return bool(torch.isfinite(norm.full_tensor() if isinstance(norm, DTensor) else norm))

    def discard(self) -> None:
        self._agreement.reach()
        self._clear_gradients()
        self._buffers.share()

    def _clear_gradients(self) -> None:
        self._optimizer.zero_grad(set_to_none=True)
        # Clipping and checks include parameters that the optimizer lacks.
        self._at_rest()[MODEL].zero_grad(set_to_none=True)
