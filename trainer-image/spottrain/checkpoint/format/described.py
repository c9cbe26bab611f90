"""What a checkpoint holds, before the bytes of its tensors are read."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any

import torch

from spottrain.checkpoint.format import codec
from spottrain.checkpoint.format.manifest import DTYPES, Manifest


@dataclass(frozen=True, slots=True)
class Described:
    """A tensor of a checkpoint."""

    dtype: torch.dtype
    shape: torch.Size


def as_described(state: dict[str, Any]) -> dict[str, Any]:
    """What `described` returns of a checkpoint of `state`. Raises UnsupportedState."""
    tensors, tree = codec.split(state)
    read: dict[str, Any] = codec.join(json.loads(json.dumps(tree)), {n: of_tensor(t) for n, t in tensors.items()})
    return read


def of_tensor(tensor: torch.Tensor) -> Described:
    return Described(tensor.dtype, tensor.shape)


def holds_tensors(state: Any) -> bool:
    """Whether there is a Described in a state."""
    if isinstance(state, dict):
        return any(map(holds_tensors, state.values()))
    return any(map(holds_tensors, state)) if isinstance(state, list | tuple) else isinstance(state, Described)


def described(manifest: Manifest) -> dict[str, Any]:
    """The state in a checkpoint, with a Described in the place of each tensor. Raises CorruptCheckpoint."""
    tensors = {
        name: Described(DTYPES[tensor.dtype], torch.Size(tensor.shape)) for name, tensor in manifest.tensors.items()
    }
    state: dict[str, Any] = codec.join(manifest.tree, tensors)
    return state
