"""Whether the ranks have the same of what a commit holds once.

A tensor that every rank has whole is written by one of them, and plain values are those of rank 0. If the ranks
differ, a commit mixes their states, and the run that resumes is another one. So each save compares a digest before
anything is copied. Copies that differ by rounding alone pass with a warning: processors of different kinds round
differently.
"""

from __future__ import annotations

import json
import logging
import math
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeGuard

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor
from zlib_ng import zlib_ng

from spottrain import exchange
from spottrain.checkpoint.errors import RanksDiffer
from spottrain.checkpoint.format import codec
from spottrain.checkpoint.saving.fingerprint import digest, projections

logger = logging.getLogger(__name__)

Path = tuple[str, ...]
"""Keys that lead to a value."""

# Largest relative difference that counts as rounding, for types that are at least as exact.
_ROUNDING = 1e-5
_WORD_BITS = 32


@dataclass(frozen=True, slots=True, kw_only=True)
class Alike:
    """What this rank has of all that is to be the same on all ranks.

    Attributes:
        tensors: Tensors that the rank has whole.
        values: Plain values by their paths, as JSON.
        shards: Its shards of tensors of which other ranks have the same shard, as under hybrid sharding.
        shard: Which of how many shards that is.
    """

    tensors: codec.Tensors
    values: dict[str, str]
    shards: codec.Tensors = field(default_factory=dict)
    shard: tuple[int, int] = (0, 1)

    @classmethod
    def of(cls, tensors: codec.Tensors, tree: codec.Json, extra: codec.Json, paths: Collection[Path]) -> Alike:
        """From a state's tensors and plain values, and the values at these paths of `extra`, as they are encoded."""
        whole = {name: each for name, tensor in sorted(tensors.items()) if (each := _whole(tensor)) is not None}
        hybrid = {name: tensor for name, tensor in sorted(tensors.items()) if _is_hybrid(tensor)}
        found = [*_leaves(tree), *(leaf for path in paths for leaf in _leaves(_at(extra, path), path))]
        return cls(
            tensors=whole,
            values={".".join(path): json.dumps(value) for path, value in found},
            shards={name: tensor.to_local() for name, tensor in hybrid.items()},
            shard=next((_shard_of(tensor) for tensor in hybrid.values()), (0, 1)),
        )

    def digest(self) -> int:
        """A number that differs if anything does, but for shards."""
        described = [f"{name} {t.dtype} {tuple(t.shape)}" for name, t in self.tensors.items()]
        plain = zlib_ng.crc32(json.dumps([described, self.values, list(self.shards)]).encode())
        return (plain << _WORD_BITS - 1) ^ (digest(self.tensors.values()) & ((1 << 2 * _WORD_BITS - 2) - 1))

    def shards_are_alike(self, group: dist.ProcessGroup) -> bool:
        """Whether all ranks that have the same shards have the same values. A collective if there are shards."""
        if not self.shards:
            return True
        every = exchange.all_gather([self.shard[0], digest(self.shards.values())], group)
        return len({tuple(each) for each in every}) == len({index for index, _ in every})

    def raise_difference(self, group: dist.ProcessGroup) -> None:
        """Find out what differs, once the digests do. A collective.

        Raises:
            RanksDiffer: On all ranks: it is more than rounding.
        """
        for find in (self._structure, self._plain_values, self._whole_tensor, self._shard):
            if (found := find(group)) is not None:
                raise RanksDiffer(_sentence(*found), found[0])
        if dist.get_rank(group) == 0:
            logger.warning(
                "The ranks' copies of the model or its optimizer differ by rounding, as on processors of different "
                "kinds. A commit takes each tensor from one of them."
            )

    def _structure(self, group: dist.ProcessGroup) -> tuple[str, int] | None:
        own = {name: [str(t.dtype), list(t.shape)] for name, t in self.tensors.items()}
        every = exchange.all_gather({**own, **dict.fromkeys(self.values), **dict.fromkeys(self.shards)}, group)
        return _first_difference(every, lambda one, two: one == two)

    def _plain_values(self, group: dist.ProcessGroup) -> tuple[str, int] | None:
        return _first_difference(exchange.all_gather(self.values, group), _is_close)

    def _whole_tensor(self, group: dist.ProcessGroup) -> tuple[str, int] | None:
        return _first_other(self.tensors, (0, 1), group)

    def _shard(self, group: dist.ProcessGroup) -> tuple[str, int] | None:
        return _first_other(self.shards, self.shard, group)


def _first_other(tensors: codec.Tensors, shard: tuple[int, int], group: dist.ProcessGroup) -> tuple[str, int] | None:
    """A tensor that differs by more than rounding between ranks with the same shard, and a rank that has it so."""
    if not tensors:
        return None
    index, count = shard
    sums = torch.stack([projections(tensor) for tensor in tensors.values()])
    extremes = torch.full((2, count, *sums.shape), -math.inf, dtype=sums.dtype)
    extremes[0, index], extremes[1, index] = sums, -sums
    dist.all_reduce(extremes, op=dist.ReduceOp.MAX, group=group)
    spread = extremes.sum(dim=0).square().mean(dim=-1).sqrt()  # about the norm of the difference
    size = extremes.abs().amax(dim=(0, 3))
    for number, (name, tensor) in enumerate(tensors.items()):
        if bool((spread[:, number] > _tolerance(tensor) * size[:, number]).any()):
            first: dict[int, int] = {}
            for rank, (of_rank, value) in enumerate(exchange.all_gather([index, digest([tensor])], group)):
                if first.setdefault(of_rank, value) != value:
                    return name, rank
    return None


def _is_hybrid(tensor: Any) -> TypeGuard[DTensor]:
    """Whether it is replicated over some dimensions of the ranks, and sharded over others."""
    return isinstance(tensor, DTensor) and len({each.is_replicate() for each in tensor.placements}) > 1


def _shard_of(tensor: DTensor) -> tuple[int, int]:
    """The number of this rank's shard, and how many there are."""
    mesh, index, count = tensor.device_mesh, 0, 1
    coordinates = mesh.get_coordinate() or ()
    for place, own, size in zip(tensor.placements, coordinates, mesh.shape, strict=True):
        if not place.is_replicate():
            index, count = index * size + own, count * size
    return index, count


def _whole(tensor: Any) -> torch.Tensor | None:
    """A tensor's values, if this rank has all of them."""
    if isinstance(tensor, DTensor):
        return tensor.to_local() if all(each.is_replicate() for each in tensor.placements) else None
    return tensor.detach() if codec.is_plain(tensor) else None


def _at(tree: codec.Json, path: Path) -> codec.Json:
    for key in path:
        tree = tree.get(key)
    return tree


def _leaves(tree: codec.Json, path: Path = ()) -> Iterator[tuple[Path, codec.Json]]:
    """The plain values of a tree, by their paths."""
    if isinstance(tree, list):
        for number, item in enumerate(tree):
            yield from _leaves(item, (*path, str(number)))
    elif isinstance(tree, dict) and not next(iter(tree), "").startswith("$"):
        for key, item in tree.items():
            yield from _leaves(item, (*path, key))
    elif not (isinstance(tree, dict) and "$tensor" in tree):
        yield path, tree


def _first_difference(every: Sequence[Mapping[str, Any]], same: Callable[[Any, Any], bool]) -> tuple[str, int] | None:
    """A name under which a rank has something else than rank 0, and that rank."""
    for rank, found in enumerate(every):
        for name in {**every[0], **found}:
            if not (name in found and name in every[0] and same(every[0][name], found[name])):
                return name, rank
    return None


def _is_close(one: str, two: str) -> bool:
    first, second = json.loads(one), json.loads(two)
    is_number = all(isinstance(each, float) for each in (first, second))
    return math.isclose(first, second, rel_tol=_ROUNDING) if is_number else one == two


def _tolerance(tensor: torch.Tensor) -> float:
    if not (tensor.is_floating_point() or tensor.is_complex()):
        return 0.0
    return max(_ROUNDING, torch.finfo(tensor.dtype).eps / 8)  # few elements are rounded differently


def _sentence(name: str, rank: int) -> str:
    kind = name.partition(".")[0]
    advice = {
        "optimizer": (
            "Use an optimizer that makes the same update on all of them. One that shards its state over the ranks "
            "goes into a ByRank of session.attach, and one that lets them train apart can't be resumed."
        ),
        "model": (
            "Let all ranks make the same update of it in each step, or register a buffer of a rank's own with "
            "persistent=False."
        ),
    }.get(kind, "Make it the same on all ranks, as by an all_reduce, before the step ends.")
    return f"Rank {rank} has another {name} than rank 0, and a commit holds one for all ranks. {advice}"
