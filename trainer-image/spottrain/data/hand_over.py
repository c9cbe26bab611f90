"""Handing micro-batches over from a worker to its rank.

torch passes tensors in shared memory, and the rank asks the worker for its descriptor. On a busy node, the rank then
waits until a thread of the worker gets a processor. A small micro-batch goes through the pipe instead, where it lies
ready.
"""

from __future__ import annotations

from io import BytesIO
from multiprocessing.reduction import ForkingPickler
from typing import Any, NamedTuple

import torch

# Bytes of tensors. A pipe holds 64 KiB.
_MOST = 48 << 10
_PROTOCOL = 5


class Packed(NamedTuple):
    """A value as bytes."""

    content: bytes


class _ByTorch(Exception):
    """The value has tensors that torch has to pass."""


class _Pickler(ForkingPickler):
    """Pickles tensors with their content."""

    def __init__(self, file: BytesIO) -> None:
        super().__init__(file, _PROTOCOL)
        self._room = _MOST
        self._storages: set[int] = set()

    def reducer_override(self, value: Any) -> Any:
        if not isinstance(value, torch.Tensor | torch.UntypedStorage | torch.TypedStorage):
            return NotImplemented
        if type(value) is not torch.Tensor or value.requires_grad or not value.is_contiguous():
            raise _ByTorch
        self._room -= value.nbytes
        storage = value.untyped_storage().data_ptr()
        if self._room < 0 or storage in self._storages:  # two views of one storage remain so
            raise _ByTorch
        self._storages.add(storage)
        return torch.from_numpy, (value.numpy(),)


def packed(value: Any) -> Any:
    """The value as bytes; itself if its tensors are large, or anything else than plain tensors on the CPU."""
    content = BytesIO()
    try:
        _Pickler(content).dump(value)
    except Exception:  # torch passes it, or says what is wrong
        return value
    return Packed(content.getvalue())


def unpacked(value: Any) -> Any:
    """The value that was packed, or the value itself."""
    return ForkingPickler.loads(value.content) if isinstance(value, Packed) else value
