"""The bridge to torch.distributed.checkpoint (DCP).

Its planners decide who writes and who reads what. DCP's planners know DTensors, shards and replicas. Its file formats
and its `.metadata` pickle are not used. Saving calls the planner's steps one by one, because `dcp.save` would put
collectives behind the upload. Loading reads what the planner asks for.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner, DefaultSavePlanner
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import (
    ReadItem,
    SavePlan,
    WriteItem,
)

from spottrain.checkpoint.errors import CheckpointMismatch, UnsupportedState
from spottrain.checkpoint.format.codec import Tensors
from spottrain.checkpoint.format.manifest import ALIGNMENT_BYTES, DTYPES, Chunk, Entry, Manifest
from spottrain.checkpoint.format.part_reader import PartReader, Span
from spottrain.checkpoint.format.plan_exchange import exchange_plans

_SHOWN = 5


@dataclass(frozen=True, slots=True, kw_only=True)
class RankPlan:
    """What this rank writes: DCP's items, and for each the place of its bytes.

    Attributes:
        size: Bytes of this rank's data, including padding.
    """

    items: tuple[WriteItem, ...]
    entries: tuple[Entry, ...]
    size: int


def signature(tensors: Tensors) -> tuple[Any, ...]:
    """Everything that a plan depends on. While it stays the same on all ranks, so does the plan."""
    return tuple(
        (fqn, t.dtype, t.shape, t.device.type, getattr(t, "placements", None), getattr(t, "device_mesh", None))
        for fqn, t in tensors.items()
    )


def plan_save(tensors: Tensors, *, rank: int, group: dist.ProcessGroup | None) -> RankPlan:
    """Agree with all ranks of `group` on who writes what. A collective.

    Replicas are written once, spread over the ranks by size.

    Args:
        tensors: This rank's tensors by name, sharded or whole.
        rank: This rank.
        group: A gloo group of all ranks. None: a world of one.

    Raises:
        UnsupportedState: The ranks' tensors don't fit together, or have a dtype that can't be stored.
    """
    planner = DefaultSavePlanner(flatten_state_dict=False, flatten_sharded_tensors=False)
    planner.set_up_planner(dict(tensors), is_coordinator=rank == 0)
    local = planner.create_local_plan()
    # With uneven sharding, some ranks have nothing. Such an empty box may share its offset with a real one, and would
    # take its place among the replicas.
    local = SavePlan([item for item in local.items if _volume(item) or _is_all(item)])
    return _lay_out(rank, exchange_plans(local, planner, rank, group))


def written_tensors(plan: RankPlan, tensors: Tensors) -> list[torch.Tensor]:
    """The local tensors that the plan writes, in its order."""
    planner = DefaultSavePlanner(flatten_state_dict=False, flatten_sharded_tensors=False)
    planner.set_up_planner(dict(tensors))
    found = [planner.resolve_data(item) for item in plan.items]
    return [tensor.detach() for tensor in found if isinstance(tensor, torch.Tensor)]


def load_tensors(tensors: Tensors, manifest: Manifest, parts: PartReader) -> None:
    """Fill `tensors` in place, each rank its own shards. Not a collective.

    Args:
        tensors: Tensors by name, sharded or whole.
        manifest: Where their bytes are.
        parts: Reads these bytes.

    Raises:
        CheckpointMismatch: Names, shapes or dtypes differ. Nothing was read.
        CorruptCheckpoint: Stored bytes are damaged.
    """
    _check_fit(tensors, manifest)
    planner = DefaultLoadPlanner(flatten_state_dict=False, flatten_sharded_tensors=False)
    planner.set_up_planner(dict(tensors), _metadata(manifest))
    chunks = {
        MetadataIndex(fqn, chunk.offsets): chunk
        for fqn, tensor in manifest.tensors.items()
        for chunk in tensor.chunks
        if chunk.begin < chunk.end
    }
    wanted = [
        _Wanted.of(item, chunks[item.storage_index], planner.resolve_tensor(item).detach())
        for item in planner.create_local_plan().items
    ]
    parts.read([each.span for each in wanted], lambda index, *piece: wanted[index].fill(*piece))


def _metadata(manifest: Manifest) -> Metadata:
    return Metadata(
        {
            fqn: TensorStorageMetadata(
                properties=TensorProperties(dtype=DTYPES[tensor.dtype]),
                size=torch.Size(tensor.shape),
                chunks=[ChunkStorageMetadata(torch.Size(c.offsets), torch.Size(c.lengths)) for c in tensor.chunks],
            )
            for fqn, tensor in manifest.tensors.items()
        }
    )


@dataclass(slots=True, kw_only=True)
class _Wanted:
    """Rows of a stored chunk, and the tensor, or part of one, that they fill piece by piece.

    Attributes:
        rows: Shape of the span: all columns of the rows that are needed.
        box: For each dimension after the first: where the target starts in the rows, and its length.
    """

    span: Span
    target: torch.Tensor
    rows: tuple[int, ...]
    box: tuple[tuple[int, int], ...]
    gathered: torch.Tensor | None = None
    missing: int = 0
    lock: threading.Lock = field(default_factory=threading.Lock)

    @classmethod
    def of(cls, item: ReadItem, chunk: Chunk, target: torch.Tensor) -> _Wanted:
        rows: tuple[int, ...] = (item.lengths[0], *chunk.lengths[1:]) if chunk.lengths else ()
        row = math.prod(chunk.lengths[1:]) * target.dtype.itemsize
        begin = chunk.begin + (item.storage_offsets[0] * row if chunk.lengths else 0)
        end = begin + math.prod(rows) * target.dtype.itemsize
        return cls(
            span=(chunk.rank, begin, end),
            target=target,
            rows=rows,
            box=tuple(zip(item.storage_offsets[1:], item.lengths[1:], strict=True)),
            missing=end - begin,
        )

    def fill(self, offset: int, data: memoryview) -> None:
        source = torch.frombuffer(data, dtype=torch.uint8)
        if self.target.shape == self.rows and _is_plain_memory(self.target):
            _bytes_of(self.target)[offset : offset + len(data)].copy_(source)
            return
        with self.lock:
            if self.gathered is None:
                self.gathered = torch.empty(self.rows, dtype=self.target.dtype)
        _bytes_of(self.gathered)[offset : offset + len(data)].copy_(source)
        with self.lock:
            self.missing -= len(data)
            if self.missing:
                return
        found, self.gathered = self.gathered, None
        for dimension, (begin, length) in enumerate(self.box, start=1):
            found = found.narrow(dimension, begin, length)
        self.target.copy_(found)


def _is_plain_memory(tensor: torch.Tensor) -> bool:
    """Whether a tensor's bytes in memory are those of its elements, row by row."""
    return tensor.is_contiguous() and not tensor.is_conj() and not tensor.is_neg()


def _bytes_of(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.view(-1).view(torch.uint8)


def _lay_out(rank: int, plan: SavePlan) -> RankPlan:
    entries = []
    position = 0
    for item in plan.items:
        data = item.tensor_data
        assert data is not None  # only tensors are planned
        dtype = data.properties.dtype
        if DTYPES.get(str(dtype).removeprefix("torch.")) is None:
            raise UnsupportedState(f"The tensor {item.index.fqn!r} has the dtype {dtype}, which can't be stored.")
        length = _volume(item) * dtype.itemsize
        chunk = Chunk(
            rank=rank,
            begin=position,
            end=position + length,
            offsets=tuple(data.chunk.offsets),
            lengths=tuple(data.chunk.sizes),
        )
        name = str(dtype).removeprefix("torch.")
        entries.append(Entry(fqn=item.index.fqn, dtype=name, shape=tuple(data.size), chunk=chunk))
        position = -(-(position + length) // ALIGNMENT_BYTES) * ALIGNMENT_BYTES
    return RankPlan(items=tuple(plan.items), entries=tuple(entries), size=position)


def _volume(item: WriteItem) -> int:
    assert item.tensor_data is not None  # only tensors are planned
    return math.prod(item.tensor_data.chunk.sizes)


def _is_all(item: WriteItem) -> bool:
    """Whether an item is the whole of its tensor, which may be empty."""
    return item.tensor_data is not None and item.tensor_data.chunk.sizes == item.tensor_data.size


def _check_fit(tensors: Mapping[str, torch.Tensor], manifest: Manifest) -> None:
    problems = [f"{fqn!r} is not in the checkpoint" for fqn in tensors if fqn not in manifest.tensors]
    problems += [f"{fqn!r} is not in the model" for fqn in manifest.tensors if fqn not in tensors]
    for fqn, tensor in tensors.items():
        stored = manifest.tensors.get(fqn)
        if stored is None:
            continue
        here = (str(tensor.dtype).removeprefix("torch."), tuple(tensor.shape))
        if here != (stored.dtype, stored.shape):
            problems.append(
                f"{fqn!r} is {stored.dtype} {list(stored.shape)} in the checkpoint and {here[0]} {list(here[1])} here"
            )
    if problems:
        more = f"; and {len(problems) - _SHOWN} more" if len(problems) > _SHOWN else ""
        raise CheckpointMismatch(
            f"The checkpoint at step {manifest.step} does not fit this model and strategy: "
            + "; ".join(problems[:_SHOWN])
            + more
            + ". Use the model that it was made with, or create a new job with a different checkpoint.uri."
        )
