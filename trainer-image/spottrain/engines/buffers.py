"""Buffers, which a model keeps besides its parameters.

Every rank has its own; a checkpoint holds rank 0's.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm


class SharedBuffers:
    """The buffers of a model that checkpoints hold.

    Buffers may depend on the samples that a rank has seen, like the statistics of norms and the codebooks of
    quantizers. `share` after each step gives all ranks rank 0's, so that a rank resumes with what it had.
    DistributedDataParallel would share them before each forward pass. That is too late for a commit, in which every
    rank writes a part of what is the same on all.
    """

    def __init__(self, model: nn.Module) -> None:
        self._model = model

    def share(self) -> None:
        """Give all ranks rank 0's buffers. A collective if the model has any."""
        take_over(_saved_buffers(self._model))


def take_over(tensors: Iterable[torch.Tensor], group: dist.ProcessGroup | None = None) -> None:
    """Copy the values of the group's first rank. A collective of the group."""
    for tensor, whole, work in [_send(tensor, group) for tensor in tensors if tensor.numel()]:
        if work is not None:
            work.wait()
        if whole is not tensor:
            tensor.copy_(whole)


def batch_norms(model: nn.Module) -> list[nn.Module]:
    return [module for module in model.modules() if isinstance(module, _BatchNorm)]


def _saved_buffers(model: nn.Module) -> list[torch.Tensor]:
    """The buffers in the state dict.

    They are looked up each time, because models replace their tensors.
    """
    return [
        buffer.detach()
        for module in model.modules()
        for name, buffer in module.named_buffers(recurse=False)
        if name not in module._non_persistent_buffers_set
    ]


def _send(
    tensor: torch.Tensor, group: dist.ProcessGroup | None
) -> tuple[torch.Tensor, torch.Tensor, dist.Work | None]:
    """Broadcast as bytes, because backends do not support every type."""
    whole = tensor.contiguous()
    as_bytes = whole.view(-1).view(torch.uint8)
    return tensor, whole, dist.broadcast(as_bytes, group=group, group_src=0, async_op=True)
