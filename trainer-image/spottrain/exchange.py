"""Values that ranks exchange, as JSON.

torch's own collectives for objects unpickle what arrives: whoever reaches a rank's port could run code in it. Here,
what arrives is data, whoever sent it. The functions are collectives on the CPU; `group` None is the default group.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist

Json = Any


def all_gather(value: Json, group: dist.ProcessGroup | None = None) -> list[Json]:
    """The values of all ranks, in order of rank, on all ranks."""
    data = _encode(value)
    sizes = _all_sizes(data, group)
    parts = [torch.empty(max(sizes), dtype=torch.uint8) for _ in sizes]
    dist.all_gather(parts, _padded(data, max(sizes)), group=group)
    return [_decode(part[:size]) for part, size in zip(parts, sizes, strict=True)]


def broadcast(value: Json, group: dist.ProcessGroup | None = None) -> Json:
    """The value of rank 0, on all ranks. Those of other ranks don't count."""
    data = _encode(value)
    size = torch.tensor([data.numel()])
    dist.broadcast(size, group_src=0, group=group)
    arriving = data if dist.get_rank(group) == 0 else torch.empty(int(size), dtype=torch.uint8)
    dist.broadcast(arriving, group_src=0, group=group)
    return _decode(arriving)


def gather(value: Json, group: dist.ProcessGroup | None = None) -> list[Json] | None:
    """The values of all ranks, in order of rank, on rank 0; None on the other ranks."""
    data = _encode(value)
    sizes = _all_sizes(data, group)
    is_first = dist.get_rank(group) == 0
    parts = [torch.empty(max(sizes), dtype=torch.uint8) for _ in sizes] if is_first else None
    dist.gather(_padded(data, max(sizes)), parts, group=group, group_dst=0)
    return [_decode(part[:size]) for part, size in zip(parts, sizes, strict=True)] if parts is not None else None


def scatter(values: Sequence[Json] | None, group: dist.ProcessGroup | None = None) -> Json:
    """This rank's value of those that rank 0 gives, one for each rank."""
    given = None if values is None else [_encode(value) for value in values]
    own_and_largest = torch.empty(2, dtype=torch.int64)
    largest = 0 if given is None else max(data.numel() for data in given)
    sizes = None if given is None else [torch.tensor([data.numel(), largest]) for data in given]
    dist.scatter(own_and_largest, sizes, group=group, group_src=0)
    size, largest = own_and_largest.tolist()
    arriving = torch.empty(largest, dtype=torch.uint8)
    padded = None if given is None else [_padded(data, largest) for data in given]
    dist.scatter(arriving, padded, group=group, group_src=0)
    return _decode(arriving[:size])


def _all_sizes(data: torch.Tensor, group: dist.ProcessGroup | None) -> list[int]:
    sizes = [torch.empty(1, dtype=torch.int64) for _ in range(dist.get_world_size(group))]
    dist.all_gather(sizes, torch.tensor([data.numel()]), group=group)
    return [int(size) for size in sizes]


def _encode(value: Json) -> torch.Tensor:
    return torch.frombuffer(bytearray(json.dumps(value, separators=(",", ":")).encode()), dtype=torch.uint8)


def _decode(data: torch.Tensor) -> Json:
    return json.loads(data.numpy().tobytes())


def _padded(data: torch.Tensor, size: int) -> torch.Tensor:
    return torch.nn.functional.pad(data, (0, size - data.numel()))
