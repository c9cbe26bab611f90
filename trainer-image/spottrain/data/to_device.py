"""Batches of any structure on a rank's device."""

from __future__ import annotations

import copy
from collections.abc import Mapping, MutableMapping
from typing import Any

import torch


def to_device(batch: Any, device: torch.device) -> Any:
    """The same structure of mappings, lists and tuples with its tensors on `device`; objects whose class knows how to
    get there, such as a tokenizer's BatchEncoding or a PackedSequence, do so by themselves."""
    if isinstance(batch, torch.Tensor):
        return batch.to(device, non_blocking=True)
    if callable(getattr(type(batch), "to", None)):  # an attribute of the batch's own may be one of its fields
        return batch.to(device)
    if isinstance(batch, MutableMapping):  # as DataLoader does, which keeps the class when it pins memory
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
