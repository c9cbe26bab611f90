"""Moving batches of any structure to a rank's device."""

from __future__ import annotations

import copy
from collections.abc import Mapping, MutableMapping
from typing import Any

import torch


def to_device(batch: Any, device: torch.device) -> Any:
    """Move the tensors in a structure of mappings, lists and tuples to `device`.

    Objects whose class has a method `to`, such as a tokenizer's BatchEncoding or a PackedSequence, move themselves.
    """
    if isinstance(batch, torch.Tensor):
        return batch.to(device, non_blocking=True)
    if callable(getattr(type(batch), "to", None)):  # of the class: an attribute of the batch may be one of its fields
        return batch.to(device)
    if isinstance(batch, MutableMapping):  # keeps the class, as DataLoader does when it pins memory
        moved = copy.copy(batch)
        for key, value in batch.items():
            moved[key] = to_device(value, device)
        return moved
    if isinstance(batch, Mapping):
        return {key: to_device(value, device) for key, value in batch.items()}
    if isinstance(batch, tuple) and hasattr(batch, "_fields"):
        return type(batch)(*(to_device(value, device) for value in batch))
    if isinstance(batch, list | tuple):
        return type(batch)(to_device(value, device) for value in batch)
    return batch
