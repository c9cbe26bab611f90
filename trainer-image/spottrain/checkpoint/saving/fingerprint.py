"""Fingerprints of tensors, to detect changes: sums over the bytes, computed on the tensors' device."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from functools import cache
from typing import Any
from zlib import crc32

import torch
from torch.distributed.checkpoint.metadata import MetadataIndex

from spottrain.checkpoint.format.codec import is_plain

# Bytes to sum at once: as many as a processor's cache holds, and enough to keep a GPU busy.
_PIECE_BYTES = {"cpu": 1 << 20}
_LARGEST_PIECE_BYTES = 32 << 20
_WORD_BYTES = 8
_SMALL_BYTES = 64 << 10


def is_comparable(tensor: torch.Tensor) -> bool:
    """Whether shape, dtype and bytes are all that there is to a tensor. The bytes may be here or in shards."""
    return is_plain(tensor) or hasattr(tensor, "__create_chunk_list__")


def fingerprints(tensors: Mapping[str, torch.Tensor], *, rank: int, world_size: int) -> dict[str, int]:
    """A number for each tensor, which differs if its bytes do, for comparisons within this process.

    For a sharded tensor, it is that of this rank's shard. The ranks divide tensors that all of them have whole among
    themselves: a rank has 0 for those of others.
    """
    sums: dict[torch.device, list[tuple[str, torch.Tensor]]] = {}
    for name, tensor in tensors.items():
        for part in _local_parts(name, tensor, rank, world_size):
            for piece in _pieces(part):
                sums.setdefault(piece.device, []).append((name, _sum(piece)))
    found = dict.fromkeys(tensors, 0)
    for of_device in sums.values():
        values = torch.stack([value for _, value in of_device]).tolist()  # waits for a GPU only once
        for (name, _), value in zip(of_device, values, strict=True):
            found[name] = hash((found[name], value))
    return found


def digest(tensors: Iterable[torch.Tensor]) -> int:
    """A number for whole tensors together, the same in every process that has the same bytes in the same order."""
    pieces: dict[torch.device, list[torch.Tensor]] = {}
    for tensor in tensors:
        pieces.setdefault(tensor.device, []).extend(_pieces(tensor))
    found = 0
    for of_device in pieces.values():
        sums = [_sum(piece) for piece in _joined(of_device)]
        found = hash((found, *(torch.stack(sums).tolist() if sums else ())))  # waits for a GPU only once
    return found


def projections(tensor: torch.Tensor) -> torch.Tensor:
    """Sums of a tensor's elements with signs drawn at random.

    They differ by about as much as the tensors do (Johnson and Lindenstrauss). Shape `(8,)`, in float64 on the CPU.
    """
    flat = torch.view_as_real(tensor).reshape(-1) if tensor.is_complex() else tensor.reshape(-1)
    found = torch.zeros(8, dtype=torch.float64)
    for piece in flat.split(_piece_bytes(flat.device) // _WORD_BYTES):  # type: ignore[no-untyped-call]
        values, words = piece.to(torch.float64).nan_to_num(), _weights(piece.device)[: len(piece)]
        for number in range(len(found)):
            signs = (words >> (number + 1) & 1) * 2 - 1
            found[number] += float((values * signs).sum())
    return found


def _joined(pieces: list[torch.Tensor]) -> Iterator[torch.Tensor]:
    """The pieces of one device, small ones joined to larger ones: each sum takes its time."""
    small: list[torch.Tensor] = []
    size = 0
    for piece in pieces:
        if piece.numel() > _SMALL_BYTES:
            yield piece
            continue
        if size + piece.numel() > _PIECE_BYTES["cpu"]:
            yield torch.cat(small)
            small, size = [], 0
        small.append(piece)
        size += piece.numel()
    if small:
        yield torch.cat(small)


def _local_parts(name: str, tensor: Any, rank: int, world_size: int) -> Iterator[torch.Tensor]:
    """The parts that this rank checks. They are its shards (by DCP's protocol), or its share of whole tensors."""
    if hasattr(tensor, "__create_chunk_list__"):
        for chunk in tensor.__create_chunk_list__():
            yield tensor.__get_tensor_shard__(MetadataIndex(name, chunk.offsets)).detach()
    elif crc32(name.encode()) % world_size == rank:
        yield tensor.detach()


def _pieces(part: torch.Tensor) -> Iterator[torch.Tensor]:
    if not part.numel():
        return
    data = part.reshape(-1).view(torch.uint8)
    if data.numel() <= _SMALL_BYTES:
        yield data
    else:
        yield from data.split(_piece_bytes(part.device))  # type: ignore[no-untyped-call]


def _piece_bytes(device: torch.device) -> int:
    return _PIECE_BYTES.get(device.type, _LARGEST_PIECE_BYTES)


def _sum(piece: torch.Tensor) -> torch.Tensor:
    """A sum in which each word counts by its place. Words that change places change the sum."""
    missing = -len(piece) % _WORD_BYTES
    if missing:
        piece = torch.nn.functional.pad(piece, (0, missing))
    elif piece.storage_offset() % _WORD_BYTES:
        piece = piece.clone()
    words = piece.view(torch.int64)
    weights = _weights(piece.device)[: len(words)]
    # One pass, faster than a copy. GPUs have no dot product of integers.
    return torch.dot(words, weights) if words.device.type == "cpu" else (words * weights).sum()


@cache
def _weights(device: torch.device) -> torch.Tensor:
    """Odd numbers, so that no bit of a word is lost."""
    generator = torch.Generator().manual_seed(0)
    limits = torch.iinfo(torch.int64)
    size = (_piece_bytes(device) // _WORD_BYTES,)
    return (torch.randint(limits.min, limits.max, size, generator=generator, dtype=torch.int64) | 1).to(device)
