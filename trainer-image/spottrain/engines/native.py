"""Base of PyTorch's own engines: parameters, optimizers and state dicts."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable
from contextlib import AbstractContextManager
from typing import Any
from unittest import mock

import torch
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_optimizer_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from spottrain.checkpoint.errors import UnsupportedState
from spottrain.engines.buffers import SharedBuffers
from spottrain.engines.engine import EngineConfig, MakeOptimizer
from spottrain.engines.model_state import frozen_names, load_model_state, model_state, share_parts, without_wrapper
from spottrain.engines.precision import weights_in_fp32
from spottrain.engines.trained import TrainedParameters

# Optimizer state by parameter name, not by number: it fits any engine and any world size.
_OPTIONS = StateDictOptions(flatten_optimizer_state_dict=True)


def named_state(model: nn.Module, optimizer: Optimizer) -> dict[str, Any]:
    """Model and optimizer by the names that parameters had before they were spread. Raises UnsupportedState."""
    model = without_wrapper(model)
    is_new = not optimizer.state
    try:
        with without_step_hooks(optimizer):
            values = get_optimizer_state_dict(model, optimizer, options=_OPTIONS)
    finally:  # torch's own error does not name the value
        for parameter, of_parameter in optimizer.state.items():
            for key, value in of_parameter.items():
                refuse_unfit(key, value, is_cut=isinstance(parameter, DTensor))
    if is_new and optimizer.state:
        count_no_step([*optimizer.param_groups, *optimizer.state.values()])
        values = get_optimizer_state_dict(model, optimizer, options=_OPTIONS)
    return {"model": model_state(model), "optimizer": values}


def without_step_hooks(optimizer: Optimizer) -> AbstractContextManager[Any]:
    """Hide a step that makes the optimizer's state from its step hooks.

    It is no step of the training. torch makes one whenever it reads or loads an optimizer that has no state.
    """
    return mock.patch.multiple(optimizer, create=True, _optimizer_step_pre_hooks={}, _optimizer_step_post_hooks={})


def count_no_step(states: Iterable[dict[str, Any]]) -> None:
    """Set the counters of an optimizer to 0 after the step that made its state.

    That step has gradients and a rate of zero, so that nothing else of Adam and its relatives differs from before. It
    would count in the correction of their moments.
    """
    for state in states:
        if "step" in state:
            state["step"] = torch.zeros_like(state["step"]) if isinstance(state["step"], torch.Tensor) else 0


def refuse_unfit(key: str, value: Any, *, is_cut: bool) -> None:
    """Refuse optimizer state that a checkpoint can't hold.

    It holds tensors, numbers and dicts of them. If parameters are cut into parts (`is_cut`), it holds no tensor that
    belongs to a rank's part as a whole. Examples are the scales of an 8-bit optimizer: each rank has different ones,
    and a checkpoint holds one. Raises UnsupportedState.
    """
    if isinstance(value, dict):
        for name, inner in value.items():
            refuse_unfit(f"{key}.{name}", inner, is_cut=is_cut)
    elif not isinstance(value, torch.Tensor | int | float):
        raise UnsupportedState(
            f"The optimizer's state {key!r} is a {type(value).__name__}, and only tensors, numbers and dicts of them "
            "can be saved; use another optimizer."
        )
    elif is_cut and isinstance(value, torch.Tensor) and not isinstance(value, DTensor) and value.numel() > 1:
        raise UnsupportedState(
            f"The optimizer's state {key!r} of shape {list(value.shape)} is not one number for each element of a "
            "parameter, and cannot be saved if parameters are sharded; use another optimizer, or the strategy ddp."
        )


def load_named_state(model: nn.Module, optimizer: Optimizer, state: dict[str, Any]) -> None:
    """Load what `named_state` returned.

    A parameter without state in the saved optimizer, as no step had used it, has none afterwards.
    """
    model = without_wrapper(model)
    load_model_state(model, state["model"])
    with without_step_hooks(optimizer):
        fresh = get_optimizer_state_dict(model, optimizer, options=_OPTIONS)  # has state of all parameters
    # By tensors: a counter that is a plain number may be one object for all parameters.
    unsaved = {id(v) for name, v in fresh.items() if name not in state["optimizer"] and isinstance(v, torch.Tensor)}
    unused = [each for each, values in optimizer.state.items() if any(id(v) in unsaved for v in values.values())]
    groups = optimizer.param_groups
    optimizer.param_groups = [group for group in groups if group["params"]]  # torch can't load one without parameters
    with without_step_hooks(optimizer):
        set_optimizer_state_dict(model, optimizer, {**fresh, **state["optimizer"]}, options=_OPTIONS)
    loaded = iter(optimizer.param_groups)
    optimizer.param_groups = [next(loaded) if group["params"] else group for group in groups]
    _undo_casts(model, optimizer, state["optimizer"])
    for parameter in unused:  # last, as torch makes the state of an optimizer that has none
        del optimizer.state[parameter]


def _undo_casts(model: nn.Module, optimizer: Optimizer, loaded: dict[str, Any]) -> None:
    """Put loaded tensors back that torch has cast to the type of their parameter.

    An optimizer chooses the types of its state. A commit with other types does not fit its next resume.
    """
    cast = get_optimizer_state_dict(model, optimizer, options=_OPTIONS)
    as_loaded = {
        id(value): loaded[name]
        for name, value in cast.items()
        if isinstance(value, torch.Tensor) and getattr(loaded.get(name), "dtype", value.dtype) != value.dtype
    }
    states = list(optimizer.state.values())
    for values in states:
        for key, value in values.items():
            if isinstance(value, dict):
                states.append(value)
            else:
                values[key] = as_loaded.get(id(value), value)


def zeros_for_unused(model: nn.Module) -> None:
    """Give parameters that no rank has used gradients of zero.

    They are then updated like others under every strategy, and have the optimizer state that a resumed rank expects.
    """
    for parameter in model.parameters():
        if parameter.requires_grad and parameter.grad is None:
            parameter.grad = torch.zeros_like(parameter)


class NamedState:
    """Implements what `Engine` says of states, for a model with plain or sharded parameters and its optimizer."""

    _model: nn.Module
    _optimizer: Optimizer

    def state(self) -> dict[str, Any]:
        return named_state(self._model, self._optimizer)

    def model_state(self) -> dict[str, Any]:
        return model_state(self._model)

    def frozen(self) -> set[str]:
        return frozen_names(self._model)

    def load_state(self, state: dict[str, Any]) -> None:
        load_named_state(self._model, self._optimizer, state)


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
        self._buffers = SharedBuffers(self._model)
        self._buffers.share()
        self._trained = TrainedParameters(without_wrapper(self._model))
        self._optimizer = optimizer(self._model)
        return self._model, self._optimizer

    @abstractmethod
    def _spread(self, model: nn.Module) -> nn.Module:
        """The model to call in forward, with tensors or DTensors as parameters."""

    @abstractmethod
    def begin_micro_batch(self, *, is_last: bool) -> None: ...

    def backward(self, loss: torch.Tensor) -> None:
        torch.autograd.backward(loss)

    def update(self) -> None:
        if self._config.clip_grad_norm is not None:
            nn.utils.clip_grad_norm_(self._model.parameters(), self._config.clip_grad_norm)
        self._optimizer.step()
        self._clear_gradients()
        self._buffers.share()

    def gradients_are_finite(self) -> bool:
        """Whether their norm is finite, which one bad element on any rank prevents."""
        gradients = [parameter.grad for parameter in self._model.parameters() if parameter.grad is not None]
        norm = nn.utils.get_total_norm(gradients)
        return bool(torch.isfinite(norm.full_tensor() if isinstance(norm, DTensor) else norm))

    def discard(self) -> None:
        self._clear_gradients()
        self._buffers.share()

    def _clear_gradients(self) -> None:
        self._optimizer.zero_grad(set_to_none=True)
        self._model.zero_grad(set_to_none=True)  # clipping and checks include parameters that the optimizer lacks
