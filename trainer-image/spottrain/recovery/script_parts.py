"""The script's own parts of a run, in a commit: their tensors, whole or in shards, and their plain values.

A part's state is stored as those of model and optimizer are: a tensor that every rank has whole is written once, and
of a DTensor each rank writes its shard. So a part may be as large as the model, such as an average of its weights.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from typing import Any, Protocol

import numpy as np
import torch
from torch.distributed.tensor import DTensor, Partial

from spottrain.checkpoint.errors import CheckpointMismatch, UnsupportedState
from spottrain.checkpoint.format import codec
from spottrain.checkpoint.format.described import Described
from spottrain.engines.parameter_state import unpacked, with_tensors
from spottrain.engines.wrapped_tensors import array_apart, is_wrapping, taken_apart

Values = dict[str, Any]

# The key of each part in the state, and the beginning of the names of its tensors.
PREFIX = "stateful."
# Arrays of more bytes are stored as tensors are.
_INLINE_BYTES = 1 << 12


class Stateful(Protocol):
    """A part of a run with a state of its own.

    Variables of the script are such a part, and so are those of a framework.

    Example:
        >>> import math
        >>> class Best:
        ...     def __init__(self):
        ...         self.loss, self.step = math.inf, 0
        ...     def state_dict(self):
        ...         return vars(self)
        ...     def load_state_dict(self, state):
        ...         vars(self).update(state)
    """

    def state_dict(self) -> dict[str, Any]:
        """The state: tensors of any size, whole or DTensors, arrays, and plain values such as numbers and lists."""
        ...

    def load_state_dict(self, state_dict: dict[str, Any], /) -> Any:
        """Restore what `state_dict` returned before a commit."""
        ...


def states_of(parts: Mapping[str, Stateful]) -> Values:
    """What a commit holds of the parts, with an Unfit in the place of what it can't hold."""
    return {(key := f"{PREFIX}{name}"): packed(part.state_dict(), key) for name, part in parts.items()}


def room_for(parts: Mapping[str, Stateful], saved: Values) -> Values:
    """Tensors to load the parts of a commit into; of parts that it doesn't hold, nothing.

    They are like those of the part's present state: on their device, and in their shards. The present ones stay.

    Args:
        parts: The script's parts.
        saved: The state in the commit, with a Described in the place of each tensor.
    """
    keys = {f"{PREFIX}{name}": part for name, part in parts.items()}
    return {
        key: with_tensors(saved[key], _like, packed(part.state_dict(), key))
        for key, part in keys.items()
        if key in saved
    }


def load_parts(parts: Mapping[str, Stateful], loaded: Values, step: int) -> None:
    """Restore the parts that a commit holds. Raises CheckpointMismatch for one that doesn't understand its state."""
    for name, part in parts.items():
        if (key := f"{PREFIX}{name}") in loaded:
            advice = "Let its load_state_dict take that state, too"
            load_part(f"{name} (stateful)", part, unpacked(loaded[key]), step, advice=advice)


def load_part(what: str, part: Stateful, saved: Values, step: int, *, advice: str) -> None:
    """Restore one part of a run. Raises CheckpointMismatch if it doesn't understand its state."""
    try:
        part.load_state_dict(saved)
    except torch.AcceleratorError:
        raise
    except (AttributeError, LookupError, TypeError, ValueError, RuntimeError) as error:
        raise CheckpointMismatch(
            f"The checkpoint at step {step} holds a state of {what} that can't be loaded: {error!r}. {advice}, or "
            "create a new job with a different checkpoint.uri."
        ) from error


def unfit_parts(state: Values) -> Iterator[str]:
    """Names of parts in `state` that no commit can hold."""
    for key, value in state.items():
        if key.startswith(PREFIX):
            try:
                codec.split({key: value})
            except UnsupportedState:
                yield key.removeprefix(PREFIX)


def without(state: Values, names: Collection[str]) -> Values:
    """The state without these parts."""
    left_out = {f"{PREFIX}{name}" for name in names}
    return {key: value for key, value in state.items() if key not in left_out}


def packed(value: Any, path: str) -> Any:
    """A state with large arrays, and tensors that wrap others, taken apart into plain tensors. See `unpacked`."""
    if isinstance(value, dict):
        return {key: packed(each, f"{path}.{key}") for key, each in value.items()}
    if type(value) in (list, tuple):
        return type(value)(packed(each, f"{path}.{number}") for number, each in enumerate(value))
    if type(value) is np.ndarray and value.nbytes > _INLINE_BYTES and value.dtype.kind in codec.ARRAYS:
        return array_apart(value)
    return _packed_tensor(value, path) if isinstance(value, torch.Tensor) else value


def _packed_tensor(tensor: torch.Tensor, path: str) -> Any:
    if isinstance(tensor, DTensor):
        is_summed = any(isinstance(each, Partial) for each in tensor.placements)
        is_plain = not is_summed and codec.is_plain(tensor.to_local())
    elif is_wrapping(tensor):
        try:
            return taken_apart(tensor, path)
        except UnsupportedState as error:
            return codec.Unfit(str(error))
    else:
        is_plain = codec.is_plain(tensor)
    if not is_plain:
        return codec.Unfit(
            f"The tensor {path!r} is a {type(tensor).__name__} ({tensor.dtype}, {tensor.layout}), which a checkpoint "
            "can't hold. Turn it into plain tensors, numbers, strings, lists or dicts first."
        )
    return tensor


def _like(_: tuple[str, ...], wanted: Described, present: Any) -> torch.Tensor:
    if isinstance(present, DTensor) and present.shape == wanted.shape:
        return torch.empty_like(present, dtype=wanted.dtype, requires_grad=False)
    device = present.device if isinstance(present, torch.Tensor) else "cpu"
    return torch.empty(wanted.shape, dtype=wanted.dtype, device=device)
