"""Losses over the whole global batch, such as those with negatives in the batch."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist


def gather(own: torch.Tensor, sizes: Sequence[int], rank: int) -> torch.Tensor:
    """The rows of all ranks in order of rank, with gradients for this rank's. A collective, as is its backward pass.

    The gradient is that of the sum of all ranks' losses.

    Args:
        own: This rank's rows, of shape `(n, ...)`. Rows beyond `sizes[rank]` don't count.
        sizes: Rows of each rank.
        rank: This rank's number.
    """
    gathered: torch.Tensor = _Gather.apply(own, tuple(sizes), rank)
    return gathered


class _Gather(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, own: torch.Tensor, sizes: tuple[int, ...], rank: int) -> torch.Tensor:
        ctx.first, ctx.size, ctx.shape = sum(sizes[:rank]), sizes[rank], own.shape
        row = own.shape[1:]
        padded = own.new_zeros((max(sizes), *row))
        padded[: sizes[rank]] = own.detach()[: sizes[rank]]
        parts = [torch.empty_like(padded) for _ in sizes]
        dist.all_gather(parts, padded)
        return torch.cat([part[:size] for part, size in zip(parts, sizes, strict=True)])

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        [gradient] = gradients
        summed = gradient.contiguous().clone()
        dist.all_reduce(summed)
        own = gradient.new_zeros(ctx.shape)
        own[: ctx.size] = summed[ctx.first : ctx.first + ctx.size]
        return own, None, None
