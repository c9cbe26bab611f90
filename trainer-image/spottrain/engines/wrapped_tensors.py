"""Values that wrap tensors: arrays, and those of torch's `__tensor_flatten__`, such as torchao's 8-bit states.

A commit has their inner tensors, the name of the class, and the values that the class needs to make one of them. A
resume looks the class up among the modules that the script has imported: a commit makes nobody import anything.
"""

from __future__ import annotations

import sys
from typing import Any, TypeGuard

import numpy as np
import torch
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from spottrain.checkpoint.errors import CheckpointMismatch, UnsupportedState
from spottrain.checkpoint.format import codec
from spottrain.checkpoint.format.manifest import DTYPES

_CLASS = "tensor subclass"
_ARRAY = "numpy array"


def is_wrapping(value: object) -> TypeGuard[Any]:
    """Whether a value wraps tensors. A DTensor is a tensor in shards instead."""
    return is_traceable_wrapper_subclass(value) and not isinstance(value, DTensor)


def taken_apart(value: Any, name: str) -> dict[str, Any]:
    """A tensor that wraps others, in plain tensors and values.

    Raises UnsupportedState, naming the tensor, if it can't be made again from them.
    """
    kind = f"{type(value).__module__}:{type(value).__qualname__}"
    inner, context = value.__tensor_flatten__()
    try:
        if _found(kind) is not type(value):
            raise UnsupportedState("a class inside a function can't be found again")
        context = _with_names(context)
        codec.encode(context)
    except (UnsupportedState, CheckpointMismatch) as error:
        raise UnsupportedState(
            f"The tensor {name!r} is a {type(value).__name__}, which can't be made again from a checkpoint: {error} "
            "Use another optimizer."
        ) from error
    return {
        _CLASS: kind,
        "context": context,
        "size": list(value.size()),
        "stride": list(value.stride()),
        "inner": {each: _inner(getattr(value, each), f"{name}.{each}") for each in inner},
    }


def array_apart(array: np.ndarray[Any, Any]) -> dict[str, Any]:
    """An array of numbers as a tensor of its bytes, which shares its memory."""
    data = np.ascontiguousarray(array).reshape(-1).view(np.uint8)
    return {_ARRAY: array.dtype.str, "shape": list(array.shape), "data": torch.from_numpy(data)}


def together(value: dict[str, Any]) -> Any:
    """What was taken apart; None for other dicts. Raises CheckpointMismatch."""
    if _ARRAY in value:
        return value["data"].numpy().view(np.dtype(value[_ARRAY])).reshape(value["shape"])
    if _CLASS not in value:
        return None
    kind = _found(value[_CLASS])
    inner = {name: together(each) if isinstance(each, dict) else each for name, each in value["inner"].items()}
    size, stride = torch.Size(value["size"]), tuple(value["stride"])
    return kind.__tensor_unflatten__(inner, _with_types(value["context"]), size, stride)


def _inner(value: torch.Tensor, name: str) -> Any:
    if is_wrapping(value):
        return taken_apart(value, name)
    if not codec.is_plain(value):
        raise UnsupportedState(
            f"The tensor {name!r} is a {type(value).__name__} ({value.dtype}, {value.layout}), which a checkpoint "
            "can't hold. Use another optimizer."
        )
    return value


def _found(name: str) -> Any:
    """The class of this name in an imported module. Raises CheckpointMismatch."""
    module, _, path = name.partition(":")
    found: Any = sys.modules.get(module)
    for part in path.split("."):
        found = getattr(found, part, None)
    if not (isinstance(found, type) and issubclass(found, torch.Tensor) and hasattr(found, "__tensor_unflatten__")):
        raise CheckpointMismatch(
            f"The checkpoint holds tensors of the class {name}, which the script hasn't imported. Import it before "
            "session.prepare, or create a new job with a different checkpoint.uri."
        )
    return found


def _with_names(context: Any) -> Any:
    """A context with torch's own types as plain values."""
    if isinstance(context, torch.dtype):
        return {"torch dtype": str(context).removeprefix("torch.")}
    if isinstance(context, torch.Size):
        return {"torch size": list(context)}
    if type(context) in (list, tuple):
        return type(context)(map(_with_names, context))
    return {key: _with_names(each) for key, each in context.items()} if type(context) is dict else context


def _with_types(context: Any) -> Any:
    """Undo `_with_names`."""
    if isinstance(context, list | tuple):
        return type(context)(map(_with_types, context))
    if not isinstance(context, dict):
        return context
    if context.keys() == {"torch dtype"}:
        return DTYPES[context["torch dtype"]]
    if context.keys() == {"torch size"}:
        return torch.Size(context["torch size"])
    return {key: _with_types(each) for key, each in context.items()}
