"""The copy that the training loop waits for: tensors go into one reused buffer of host memory."""

from __future__ import annotations

import contextlib
import logging
import mmap
import os
import weakref
from dataclasses import dataclass

import torch

from spottrain.checkpoint.format.codec import Tensors
from spottrain.checkpoint.format.dcp import RankPlan, written_tensors
from spottrain.checkpoint.format.manifest import DTYPES

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class SharedMemory:
    """Bytes in a file without a name, so that nothing of it is ever left behind.

    Other processes map it by its descriptor. Both live as long as this object.
    """

    content: torch.Tensor
    descriptor: int

    @classmethod
    def of(cls, size: int) -> SharedMemory:
        """Create it, with its pages touched, and pinned if this process uses CUDA."""
        descriptor = os.memfd_create("spottrain-staging")
        try:
            os.truncate(descriptor, size)
            found = cls(torch.frombuffer(mmap.mmap(descriptor, size), dtype=torch.uint8), descriptor)
        except BaseException:
            os.close(descriptor)
            raise
        weakref.finalize(found.content, os.close, descriptor)
        found.content.zero_()
        # Only if the process uses the GPU already: otherwise pinning would create a context there.
        if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
            _pin(found.content)
        return found


@dataclass(frozen=True, slots=True)
class Staged:
    """The bytes of a data file, valid until the next `StagingBuffer.stage`.

    Attributes:
        data: The first bytes of `memory`.
    """

    memory: SharedMemory
    data: memoryview


class StagingBuffer:
    """Host memory for one save at a time, laid out as the rank's data file."""

    def __init__(self) -> None:
        self._memory = SharedMemory.of(1)  # a mapping can't be empty
        self._plan: RankPlan | None = None
        self._targets: list[torch.Tensor] = []

    @property
    def memory(self) -> SharedMemory:
        """Where the next save is staged, unless it needs more."""
        return self._memory

    def prepare(self, plan: RankPlan) -> None:
        """Allocate memory for `plan` and touch its pages. The next `stage` then only copies."""
        if plan is self._plan:
            return
        if self._memory.content.numel() < plan.size:
            self._memory = SharedMemory.of(plan.size)
        self._targets = [
            self._memory.content[entry.chunk.begin : entry.chunk.end]
            .view(DTYPES[entry.dtype])
            .view(entry.chunk.lengths)
            for entry in plan.entries
        ]
        self._plan = plan

    def stage(self, plan: RankPlan, tensors: Tensors) -> Staged:
        """Copy what `plan` writes. The bytes are valid until the next call."""
        self.prepare(plan)
        sources = written_tensors(plan, tensors)
        for target, source in zip(self._targets, sources, strict=True):
            target.copy_(source, non_blocking=source.is_cuda)
        # The next step may overwrite a source as soon as this returns.
        for device in {source.device for source in sources if source.is_cuda}:
            torch.cuda.synchronize(device)
        return Staged(self._memory, self._memory.content[: plan.size].numpy().data)


def _pin(memory: torch.Tensor) -> None:
    """Pin as torch's own shared staging does (torch.distributed._state_dict_utils). Without it, copies are slower."""
    cuda = torch.cuda.cudart()  # type: ignore[no-untyped-call]
    try:
        torch.cuda.check_error(int(cuda.cudaHostRegister(memory.data_ptr(), memory.nbytes, 0)))
    except torch.cuda.CudaError as error:
        logger.warning("The %d bytes of memory that stage checkpoints can't be pinned: %s.", memory.nbytes, error)
        # CUDA reports the error once more, to the next kernel that starts.
        with contextlib.suppress(RuntimeError):
            torch.ones(1, device="cuda")
        return
    weakref.finalize(memory, cuda.cudaHostUnregister, memory.data_ptr()).atexit = False
