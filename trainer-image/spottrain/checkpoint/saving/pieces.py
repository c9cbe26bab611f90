"""Staging in pieces: what a rank writes, if there is no memory for a copy of all of it.

Each piece is copied, then uploaded, and the next one takes its memory. Training waits until all are uploaded, because
a step would change what isn't copied yet. The bytes are those that are staged as a whole otherwise.
"""

from __future__ import annotations

import threading
from bisect import bisect_right
from collections.abc import Iterator, Sequence

import torch

from spottrain.checkpoint.errors import SaveFailed
from spottrain.checkpoint.format.dcp import RankPlan
from spottrain.checkpoint.format.manifest import DTYPES


class StagedPieces:
    """The bytes of a data file, copied from the tensors as they are asked for. Implements Pieces.

    The tensors have to stay as they are until `close`.
    """

    def __init__(self, plan: RankPlan, sources: Sequence[torch.Tensor], memory: torch.Tensor) -> None:
        """`memory` holds one piece. `sources` are the tensors that `plan` writes, in its order."""
        self.piece_bytes = memory.numel()
        self._size = plan.size
        self._entries = plan.entries
        self._ends = [entry.chunk.end for entry in plan.entries]
        self._sources = sources
        self._memory = memory
        self._lock = threading.Lock()
        self._is_closed = False

    def __len__(self) -> int:
        return self._size

    def __iter__(self) -> Iterator[memoryview]:
        for begin in range(0, self._size, self.piece_bytes):
            yield self.content(begin, min(begin + self.piece_bytes, self._size))

    def content(self, begin: int, end: int) -> memoryview:
        """Bytes of the file, at most `piece_bytes`, from the begin of a tensor or a piece. Valid until the next call.

        Raises SaveFailed once it is closed.
        """
        target = self._memory[: end - begin]
        with self._lock:
            if self._is_closed:
                raise SaveFailed("The checkpoint was given up before all of its pieces were copied.")
            target.zero_()  # there is padding between tensors
            for index in range(bisect_right(self._ends, begin), len(self._entries)):
                if self._entries[index].chunk.begin >= end:
                    break
                self._copy(index, begin, target)
            synchronize(self._sources)
        return target.numpy().data

    def close(self) -> None:
        """End the copies. The tensors may change as soon as this returns."""
        with self._lock:
            self._is_closed = True
            self._sources = []

    def _copy(self, index: int, begin: int, target: torch.Tensor) -> None:
        """Copy what a tensor has in the bytes that begin at `begin`. Bounds of pieces are bounds of elements."""
        chunk, dtype = self._entries[index].chunk, DTYPES[self._entries[index].dtype]
        first, last = max(begin, chunk.begin), min(begin + target.numel(), chunk.end)
        if first < last:
            source = _elements(
                self._sources[index],
                (first - chunk.begin) // dtype.itemsize,
                (last - chunk.begin) // dtype.itemsize,
            )
            target[first - begin : last - begin].view(dtype).copy_(source, non_blocking=source.is_cuda)


def synchronize(sources: Sequence[torch.Tensor]) -> None:
    """Wait for the copies from accelerators."""
    for device in {source.device for source in sources if source.is_cuda}:
        torch.cuda.synchronize(device)


def _elements(tensor: torch.Tensor, first: int, last: int) -> torch.Tensor:
    """Some elements by their numbers, row by row, without a copy of the other rows."""
    if tensor.dim() == 0:
        return tensor.reshape(1)
    row = tensor.numel() // tensor.shape[0]
    begin = first // row
    return tensor[begin : -(-last // row)].reshape(-1)[first - begin * row : last - begin * row]
