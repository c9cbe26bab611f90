"""The copy that the training loop waits for: tensors into one reused buffer of host memory."""

from __future__ import annotations

import torch

from spottrain.checkpoint.codec import Tensors
from spottrain.checkpoint.dcp import RankPlan, written_tensors
from spottrain.checkpoint.manifest import DTYPES


class StagingBuffer:
    """Host memory for one save at a time, laid out as the rank's data file; pinned where CUDA is used."""

    def __init__(self) -> None:
        self._memory = torch.empty(0, dtype=torch.uint8)
        self._plan: RankPlan | None = None
        self._targets: list[torch.Tensor] = []

    def prepare(self, plan: RankPlan) -> None:
        """Have room for `plan` and touch its pages, so that the next `stage` is only the copy."""
        if plan is self._plan:
            return
        if self._memory.numel() < plan.size:
            self._memory = torch.zeros(plan.size, dtype=torch.uint8, pin_memory=torch.cuda.is_available())
        self._targets = [
            self._memory[entry.chunk.begin : entry.chunk.end].view(DTYPES[entry.dtype]).view(entry.chunk.lengths)
            for entry in plan.entries
        ]
        self._plan = plan

    def stage(self, plan: RankPlan, tensors: Tensors) -> memoryview:
        """Copy what `plan` writes; returns the bytes of the data file, valid until the next `stage`."""
        self.prepare(plan)
        sources = written_tensors(plan, tensors)
        on_accelerator = any(source.is_cuda for source in sources)
        for target, source in zip(self._targets, sources, strict=True):
            target.copy_(source, non_blocking=on_accelerator)
        if on_accelerator:
            torch.cuda.synchronize()
        return self._memory[: plan.size].numpy().data
