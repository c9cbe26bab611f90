"""The state of a model in a checkpoint: plain tensors and shards.

Their names are those of the unspread model. A quantized weight has several parts. Each part has a name of its own:

- A tensor that wraps others (torchao's, by torch's protocol `__tensor_flatten__`) is saved as its inner tensors:
  `weight.qdata`, `weight.scale`.
- A 4-bit weight of bitsandbytes consists of packed bytes and a quantization state: `weight.absmax`,
  `weight.quant_state.bitsandbytes__nf4`. Its modules write that state to state dicts, but don't read it from there.
- Other modules keep scales that are neither parameters nor buffers, such as bitsandbytes' `SCB` of 8-bit weights.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from typing import Any

import torch
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, set_model_state_dict
from torch.nn.parallel import DistributedDataParallel

from spottrain.checkpoint.errors import UnsupportedState
from spottrain.engines.buffers import changing_modules, copy_from_first
from spottrain.engines.wrapped_tensors import is_wrapping

Tensors = dict[str, torch.Tensor]

# Parts of names that torch.compile and activation checkpointing add. State dicts leave them out.
_WRAPPERS = ("_orig_mod", "_checkpoint_wrapped_module")
_EXTRA_STATE = "_extra_state"
# The numbers of a quantization state are packed as JSON, whose length depends on their digits. It is padded with
# spaces, so that the states of two models have the same shape.
_PACKED = "quant_state.bitsandbytes__"
_PACKED_BYTES = 256


def without_wrapper(model: nn.Module) -> nn.Module:
    """The model inside DDP.

    torch doesn't remove DDP's prefix from all names of a module that occurs several times.
    """
    return model.module if isinstance(model, DistributedDataParallel) else model


def model_state(model: nn.Module) -> dict[str, Any]:
    """The model's state dict, to save it or to load into it. Raises UnsupportedState."""
    model = without_wrapper(model)
    try:
        state = model.state_dict()
    except NotImplementedError as error:  # as bitsandbytes' embeddings do
        raise UnsupportedState(
            f"A module of the model has no state that could be saved: {error}. If it is quantized, leave it as "
            "it was before."
        ) from error
    for key in list(state):
        value = state.pop(key)
        state.update(_plain(unwrapped(key), value))
    state.update(_quantization_states(model))
    return state


def full_state(state: Mapping[str, Any], *, keep: bool) -> dict[str, Any]:
    """Gather the shards of a model's state, one tensor after the other; a collective.

    Args:
        state: The model's part of an engine's state.
        keep: Whether this rank wants the result.

    Returns:
        The values by name, tensors whole and in the CPU's memory; {} on ranks that don't keep them.
    """
    full = {}
    for name, value in state.items():
        whole = value.full_tensor() if hasattr(value, "full_tensor") else value
        if keep:
            full[name] = whole.detach().to("cpu", copy=True) if isinstance(whole, torch.Tensor) else whole
    return full


def num_bytes(parameter: nn.Parameter) -> int:
    """Size of a parameter, or of what it wraps."""
    return sum(tensor.nbytes for _, tensor in _plain("", parameter))


def wrapping_names(model: nn.Module) -> Iterator[str]:
    """Names of parameters that wrap tensors and aren't trained. DDP can't broadcast them; `share_parts` does."""
    for name, parameter in model.named_parameters(remove_duplicate=False):
        if not parameter.requires_grad and is_wrapping(parameter):
            yield name


def unfit_for_shards(model: nn.Module) -> str | None:
    """Why weights of `model` can't be sharded, as a sentence; None if they can.

    bitsandbytes' 8-bit modules can't be sharded because they hold the whole weight a second time.
    """
    unfit = {*wrapping_names(model), *(name for name, each in model.named_parameters() if hasattr(each, "SCB"))}
    for name, parameter in model.named_parameters():
        if name in unfit:
            kind = type(parameter).__name__
            return f"The parameter {name} is a quantized weight ({kind}) that can't be sharded. Use the strategy ddp."
    return None


def load_model_state(model: nn.Module, state: dict[str, Any]) -> None:
    """Load values into a model, from a dict such as its `model_state` returns."""
    model = without_wrapper(model)
    # A copy, as torch takes values out of it.
    set_model_state_dict(model, dict(state), options=StateDictOptions(strict=False))
    put_back(model, state)


def share_parts(model: nn.Module, device: torch.device) -> None:
    """Give all ranks rank 0's parts of quantized weights. A collective if there are any."""
    model = without_wrapper(model)
    parts = {name: tensor.to(device) for name, tensor in _beside(model, model_state(model)).items()}
    copy_from_first(parts.values())
    put_back(model, parts)


def frozen_names(model: nn.Module) -> set[str]:
    """Names in `model_state` of values that aren't trained.

    They include all names of a parameter that has several, and the parts of quantized weights. A buffer may change
    with the samples. It counts as trained if the whole model is trained, or if its module has trained parameters.
    """
    model = without_wrapper(model)
    named = model.named_parameters(remove_duplicate=False)
    changing = {unwrapped(name) for name, parameter in named if parameter.requires_grad}
    changing |= {_name(prefix, name) for prefix, module in changing_modules(model) for name in module._buffers}
    return {name for name in model_state(model) if not name.endswith(_EXTRA_STATE) and not _is_within(name, changing)}


def changing_values(model: nn.Module) -> dict[str, Any]:
    """What a forward pass may change of `model_state`, by name: extra states, and buffers that aren't frozen."""
    model = without_wrapper(model)
    buffers = {
        _name(prefix, name): buffer
        for prefix, module in changing_modules(model)
        for name, buffer in module._buffers.items()
        if buffer is not None and name not in module._non_persistent_buffers_set
    }
    extra = {
        _name(prefix, _EXTRA_STATE): module.get_extra_state()
        for prefix, module in model.named_modules(remove_duplicate=False)
        if type(module).get_extra_state is not nn.Module.get_extra_state
    }
    return buffers | extra


def _name(prefix: str, name: str) -> str:
    return unwrapped(f"{prefix}.{name}".lstrip("."))


def _is_within(name: str, wholes: Collection[str]) -> bool:
    return bool(name) and (name in wholes or _is_within(name.rpartition(".")[0], wholes))


def unwrapped(name: str) -> str:
    """A name in a state dict without the parts that wrappers of modules add."""
    return ".".join(part for part in name.split(".") if part not in _WRAPPERS)


def _plain(name: str, value: Any) -> Iterator[tuple[str, Any]]:
    """The inner tensors of a value that wraps tensors, or the value itself. DCP takes shards apart."""
    if not is_wrapping(value):
        yield name, value
        return
    inner, _ = value.__tensor_flatten__()
    for attribute in inner:
        yield from _plain(f"{name}.{attribute}", getattr(value, attribute))


def _beside(model: nn.Module, state: dict[str, Any]) -> Tensors:
    """Tensors that torch's loading leaves out. They are neither parameters, nor buffers, nor extra state."""
    own = {unwrapped(name) for name, _ in model.named_parameters(remove_duplicate=False)}
    own |= {unwrapped(name) for name, _ in model.named_buffers(remove_duplicate=False)}
    others = {name: value for name, value in state.items() if name not in own and not name.endswith(_EXTRA_STATE)}
    return {name: value for name, value in others.items() if isinstance(value, torch.Tensor)}


def put_back(model: nn.Module, state: Mapping[str, Any]) -> None:
    """Load the parts of quantized weights, which torch's loading leaves out."""
    with torch.no_grad():
        for name, tensor in _beside(model, model_state(model)).items():
            tensor.copy_(state[name])
    for name, module, quantization in _quantized(model):
        prefix = f"{name}."
        stored = {key.removeprefix(prefix): value for key, value in state.items() if key.startswith(prefix)}
        loaded = type(quantization).from_dict(stored, device=quantization.absmax.device)
        owners: tuple[Any, ...] = (module, module.weight)
        for owner in owners:
            if getattr(owner, "quant_state", None) is not None:
                owner.quant_state = loaded


def _quantized(model: nn.Module) -> Iterator[tuple[str, nn.Module, Any]]:
    """4-bit weights of bitsandbytes.

    Each is the name, the module, and the quantization state. Under FSDP2 only the module has that state.
    """
    for prefix, module in model.named_modules(remove_duplicate=False):
        weight = module._parameters.get("weight")  # its own; PEFT's layers also show that of the layer that they wrap
        quantization = getattr(weight, "quant_state", None) or getattr(module, "quant_state", None)
        if weight is not None and hasattr(quantization, "from_dict"):
            yield unwrapped(f"{prefix}.weight".lstrip(".")), module, quantization


def _quantization_states(model: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    for name, _, quantization in _quantized(model):
        for key, value in quantization.as_dict(packed=True).items():
            if key.startswith(_PACKED):
                value = nn.functional.pad(value, (0, -len(value) % _PACKED_BYTES), value=ord(" "))
            yield f"{name}.{key}", value.detach()
