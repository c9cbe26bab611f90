"""Parts of parameters under ZeRO: any contiguous range of the flattened tensor.

Checkpoints hold boxes of whole tensors. A range of a flattened tensor consists of a few boxes, so a ZeRO checkpoint
is
like any other: every tensor with its own name and shape, in parts that any other world size can read.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex, TensorProperties
from torch.distributed.checkpoint.planner import TensorWriteData, WriteItem, WriteItemType


@dataclass(frozen=True, slots=True, kw_only=True)
class Box:
    """A box of a tensor, contiguous in the flattened tensor.

    Its elements start at `begin`. All numbers are in elements.
    """

    offsets: tuple[int, ...]
    lengths: tuple[int, ...]
    begin: int

    @property
    def end(self) -> int:
        return self.begin + math.prod(self.lengths)


def boxes(shape: tuple[int, ...], begin: int, end: int) -> Iterator[Box]:
    """The fewest boxes that make up a range of a flattened tensor.

    The range is the elements [begin, end) of a tensor of this shape.
    """
    if begin >= end:
        return
    if not shape:
        yield Box(offsets=(), lengths=(), begin=0)
        return
    row = math.prod(shape[1:])
    first, last = -(-begin // row), end // row
    if first > last:  # within one row
        yield from _of_row(shape, last, begin, end)
        return
    if begin < first * row:
        yield from _of_row(shape, first - 1, begin, first * row)
    if first < last:
        offsets = (first, *(0 for _ in shape[1:]))
        yield Box(offsets=offsets, lengths=(last - first, *shape[1:]), begin=first * row)
    if last * row < end:
        yield from _of_row(shape, last, last * row, end)


def _of_row(shape: tuple[int, ...], index: int, begin: int, end: int) -> Iterator[Box]:
    start = index * math.prod(shape[1:])
    for box in boxes(shape[1:], begin - start, end - start):
        yield Box(offsets=(index, *box.offsets), lengths=(1, *box.lengths), begin=start + box.begin)


class FlatPart(torch.Tensor):
    """A tensor of which this rank has a range of the flattened elements.

    DCP saves and loads it. It holds no other elements, so that nothing can be computed with it.

    Attributes:
        part: A view of this rank's memory, of shape `(elements,)`.
        begin: Where it starts in the flattened tensor.
    """

    part: torch.Tensor
    begin: int

    @staticmethod
    def __new__(cls, part: torch.Tensor, *, shape: torch.Size, begin: int) -> FlatPart:
        made: FlatPart = torch.Tensor._make_wrapper_subclass(cls, shape, dtype=part.dtype, device=part.device)
        made.part = part.detach()
        made.begin = begin
        return made

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        raise NotImplementedError(f"{func} needs a whole tensor, and this rank has only a part of it")

    def full_tensor(self) -> torch.Tensor:
        """The whole tensor, as DTensor's; a collective. The ranks' parts don't overlap."""
        whole = torch.zeros(self.shape.numel(), dtype=self.dtype, device=self.device)
        whole[self.begin : self.begin + self.part.numel()] = self.part
        dist.all_reduce(whole)
        return whole.view(self.shape)

    def __repr__(self, **_: Any) -> str:  # type: ignore[override]
        end = self.begin + self.part.numel()
        return f"FlatPart([{self.begin}, {end}) of {tuple(self.shape)}, {self.dtype})"

    # What DCP requires of a sharded tensor (torch.distributed.checkpoint._Checkpointable).

    def __create_write_items__(self, fqn: str, object: Any) -> list[WriteItem]:
        properties = TensorProperties(dtype=self.dtype)
        return [
            WriteItem(
                index=MetadataIndex(fqn, chunk.offsets),
                type=WriteItemType.SHARD,
                tensor_data=TensorWriteData(chunk=chunk, properties=properties, size=self.size()),
            )
            for chunk in self.__create_chunk_list__()
        ]

    def __create_chunk_list__(self) -> list[ChunkStorageMetadata]:
        return [ChunkStorageMetadata(torch.Size(box.offsets), torch.Size(box.lengths)) for box in self._boxes()]

    def __get_tensor_shard__(self, index: MetadataIndex) -> torch.Tensor:
        box = next(box for box in self._boxes() if box.offsets == tuple(index.offset or ()))
        return self.part[box.begin - self.begin : box.end - self.begin].view(box.lengths)

    def _boxes(self) -> Iterator[Box]:
        return boxes(tuple(self.shape), self.begin, self.begin + self.part.numel())
