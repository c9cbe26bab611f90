"""Replicas: every rank holds the whole model (DistributedDataParallel)."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from spottrain.engines.engine import EngineConfig


class DdpEngine:
    """Implements Engine. Also for a world of one, where it averages over one."""

    def __init__(self, config: EngineConfig) -> None:
        self._config = config
        self._ddp: DistributedDataParallel | None = None

    def wrap(self, model: nn.Module) -> nn.Module:
        device, precision = self._config.device, self._config.precision
        model.to(device)
        if precision is not torch.float32:
            autocast = torch.autocast(device.type, dtype=precision)
            model.forward = autocast(model.forward)
            model.register_forward_hook(_to_fp32)
        self._ddp = DistributedDataParallel(
            model, device_ids=[device] if device.type == "cuda" else None, gradient_as_bucket_view=True
        )
        return self._ddp

    def begin_micro_batch(self, *, is_last: bool) -> None:
        # What DistributedDataParallel.no_sync() sets, without a context that would have to span the caller's loop.
        if self._ddp is not None:
            self._ddp.require_backward_grad_sync = is_last


def _to_fp32(module: nn.Module, args: Any, output: Any) -> Any:
    return output.float() if isinstance(output, torch.Tensor) and output.is_floating_point() else output
