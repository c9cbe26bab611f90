"""Batch norm's running statistics, of which every rank has its own, while a checkpoint has rank 0's."""

from __future__ import annotations

import torch.distributed as dist
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm


class RunningStatistics:
    """Those of a model. `share` after each step gives all ranks rank 0's, as DistributedDataParallel does before
    each forward, so that a rank that resumes has what it had."""

    def __init__(self, model: nn.Module) -> None:
        self._buffers = [buffer for norm in batch_norms(model) for buffer in norm.buffers()]

    def share(self) -> None:
        """A collective where the model has batch norms."""
        sent = [dist.broadcast(buffer.detach(), src=0, async_op=True) for buffer in self._buffers]
        for work in sent:
            if work is not None:
                work.wait()


def batch_norms(model: nn.Module) -> list[nn.Module]:
    return [module for module in model.modules() if isinstance(module, _BatchNorm)]
