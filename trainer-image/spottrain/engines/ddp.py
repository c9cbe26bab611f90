"""Replicas: every rank holds the whole model (DistributedDataParallel)."""

from __future__ import annotations

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from spottrain.engines.buffers import SharedBuffers
from spottrain.engines.engine import EngineConfig
from spottrain.engines.native import NativeEngine
from spottrain.engines.precision import autocast_forward


class DdpEngine(NativeEngine):
    """Implements Engine. Also for a world of one, where it averages over one."""

    def __init__(self, config: EngineConfig) -> None:
        super().__init__(config)
        self._ddp: DistributedDataParallel | None = None

    def _spread(self, model: nn.Module) -> nn.Module:
        device, precision = self._config.device, self._config.precision
        model.to(device)
        self._ddp = DistributedDataParallel(
            model, device_ids=[device] if device.type == "cuda" else None, gradient_as_bucket_view=True
        )
        settle_buckets(self._ddp, model)
        self._buffers = SharedBuffers(model)
        if precision is not torch.float32:
            autocast_forward(model, device, precision)
        return self._ddp

    def begin_micro_batch(self, *, is_last: bool) -> None:
        # What DistributedDataParallel.no_sync() sets, without a context that would have to span the caller's loop.
        if self._ddp is not None:
            self._ddp.require_backward_grad_sync = is_last

    def update(self) -> None:
        # DDP does it before the next forward; a commit in between has parts of each rank.
        super().update()
        self._buffers.share()


def settle_buckets(ddp: DistributedDataParallel, model: nn.Module) -> None:
    """Run a backward pass with zero gradients, whose order DDP takes for its buckets.

    DDP rearranges its buckets once, after its first backward pass, and the place in a bucket decides in which
    order the ranks' gradients are added up. So without this the first step after a resume would round
    differently from the same step of a run that was not interrupted.
    """

    def touch_all_parameters() -> torch.Tensor:
        touched = [parameter.sum() * 0 for parameter in model.parameters() if parameter.requires_grad]
        return torch.stack(touched).sum()

    own = vars(model).get("forward")  # where a framework has put one around the class's
    model.forward = touch_all_parameters
    try:
        torch.autograd.backward(ddp())
    finally:
        if own is None:
            del model.forward
        else:
            model.forward = own
    ddp.zero_grad(set_to_none=True)
