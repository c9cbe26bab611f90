"""Replicas: every rank holds the whole model (DistributedDataParallel)."""

from __future__ import annotations

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from spottrain.engines.buffers import check_buffers, copy_from_first
from spottrain.engines.engine import EngineConfig
from spottrain.engines.model_state import wrapping_names
from spottrain.engines.native import NativeEngine
from spottrain.engines.precision import autocast_forward
from spottrain.engines.used import UsedParameters

# Types that DDP can send: gloo and NCCL know them, or complex numbers as pairs of them.
_SENT = {
    *(torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.complex64, torch.complex128),
    *(torch.int64, torch.int32, torch.int8, torch.uint8, torch.bool),
}


class DdpEngine(NativeEngine):
    """Implements Engine, also for a world of one."""

    def __init__(self, config: EngineConfig) -> None:
        super().__init__(config)
        self._ddp: DistributedDataParallel | None = None
        self._is_last = False

    def _spread(self, model: nn.Module) -> nn.Module:
        device, precision = self._config.device, self._config.precision
        model.to(device)
        check_buffers(model)  # before DDP sends them
        if precision is not torch.float32:
            autocast_forward(model, device, precision)
        if not any(each.requires_grad for each in model.parameters()):  # a teacher, which DDP refuses
            copy_from_first(each.detach() for each in model.parameters())
            return model
        unsent = _unsent(model)
        ignored = [*wrapping_names(model), *unsent]
        DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(model, ignored)  # type: ignore[no-untyped-call]
        self._ddp = DistributedDataParallel(
            model,
            device_ids=[device] if device.type == "cuda" else None,
            # Shared after each step instead, so that a commit does not mix buffers of several ranks.
            forward_sync_buffers=False,
            gradient_as_bucket_view=True,
        )
        copy_from_first(unsent.values())
        settle_buckets(self._ddp, model)
        return self._ddp

    def begin_micro_batch(self, *, is_last: bool) -> None:
        # What DistributedDataParallel.no_sync() sets. As a context it would have to span the caller's loop.
        if self._ddp is not None:
            self._ddp.require_backward_grad_sync = is_last
            self._is_last = is_last

    def _watch(self, used: UsedParameters) -> None:
        used.watch_all()

    def backward(self, loss: torch.Tensor) -> None:
        """Run backward, and give DDP the gradients for which it still waits after the last one of a step.

        They are those of parameters that this rank hasn't used, such as an expert's. DDP's own search for them
        (find_unused_parameters) follows what forward returns. It misses parameters that enter the loss in a
        different way.
        """
        super().backward(loss)
        if self._is_last:
            self._trained.check(may_freeze=False)
            with self._used.paused():
                _add_zeros(self._used.unused_in_pass())


def settle_buckets(ddp: DistributedDataParallel, model: nn.Module) -> None:
    """Run a backward pass with zero gradients, to settle DDP's buckets.

    DDP rearranges its buckets once, by the order of its first backward pass. The place in a bucket decides in which
    order the ranks' gradients are added up. Without this pass, the first step after a resume would round differently
    from the same step of an uninterrupted run.
    """

    ddp.module = _Nothing()  # not the model, whose hooks expect its own inputs and outputs
    # Nor its buffers: DDP would list those of `_Nothing`, and can't send an empty list. The pass sets this again.
    ddp.require_forward_param_sync = False
    try:
        ddp(torch.zeros(()))  # on a GPU, DDP needs an argument, which it moves there
    finally:
        ddp.module = model
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    for parameter in reversed(trained):  # roughly the order of backward
        _add_zeros([parameter])
    ddp.zero_grad(set_to_none=True)


class _Nothing(nn.Module):
    def forward(self, _: torch.Tensor) -> tuple[()]:
        return ()


def _unsent(model: nn.Module) -> dict[str, torch.Tensor]:
    """Frozen weights and buffers of types that DDP can't send, by name."""
    wrapping = set(wrapping_names(model))
    named = [*model.named_parameters(remove_duplicate=False), *model.named_buffers(remove_duplicate=False)]
    return {
        name: each.detach()
        for name, each in named
        if not each.requires_grad and each.dtype not in _SENT and name not in wrapping
    }


def _add_zeros(parameters: list[nn.Parameter]) -> None:
    """Add gradients of zero, which take no memory before they are added."""
    if parameters:
        zeros = [torch.zeros((), dtype=p.dtype, device=p.device).expand_as(p) for p in parameters]
        torch.autograd.backward(parameters, zeros)
