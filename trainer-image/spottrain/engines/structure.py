"""The tensors of a model by name, shape and type, which have to be the same on all ranks."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Sequence
from itertools import zip_longest

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parameter import is_lazy

from spottrain import exchange
from spottrain.world.failures import UserError


def described(named: Iterable[tuple[str, torch.Tensor]]) -> list[str]:
    """One line for each tensor."""
    return [f"{name} ({str(t.dtype).removeprefix('torch.')}{_shape(t)})" for name, t in named]


def digest_of(lines: Sequence[str]) -> int:
    """A positive number of 62 bits."""
    return int.from_bytes(hashlib.blake2b("\n".join(lines).encode(), digest_size=8).digest()) >> 2


def first_difference(own: Sequence[str], group: dist.ProcessGroup | None) -> str | None:
    """Where the lines of two ranks differ, as a clause; None if they don't. A collective."""
    every = exchange.all_gather(list(own), group)
    other = next((rank for rank, lines in enumerate(every) if lines != every[0]), None)
    if other is None:
        return None
    first, second = next(pair for pair in zip_longest(every[0], every[other]) if pair[0] != pair[1])
    return f"rank 0 has {first or 'no more'} where rank {other} has {second or 'no more'}"


def check_same_model(model: nn.Module) -> None:
    """Refuse a model that is not the same on all ranks. A collective."""
    if dist.get_world_size() == 1:
        return
    trained = [f"{name} {'trained' if each.requires_grad else 'frozen'}" for name, each in model.named_parameters()]
    parts = [*described(model.named_parameters(remove_duplicate=False)), *described(model.named_buffers()), *trained]
    digests = exchange.all_gather(digest_of(parts))
    if len(set(digests)) > 1:
        raise UserError(
            f"the ranks have built different models: {first_difference(parts, None)}. Build the same model on all "
            "ranks; what depends on the rank belongs into the data"
        )


def _shape(tensor: torch.Tensor) -> str:
    return "" if is_lazy(tensor) else f", {list(tensor.shape)}"
