"""The copy that the training loop waits for: tensors go into one reused buffer of host memory."""

from __future__ import annotations

import contextlib
import logging
import math
import mmap
import os
import weakref
from dataclasses import dataclass

import torch

from spottrain.checkpoint.format.codec import Tensors
from spottrain.checkpoint.format.dcp import RankPlan, written_tensors
from spottrain.checkpoint.format.manifest import BLOCK_BYTES, DTYPES
from spottrain.checkpoint.saving.pieces import StagedPieces, synchronize
from spottrain_planner.memory_estimate import PIECE_BYTES

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

    def __len__(self) -> int:
        return len(self.data)

    def content(self, begin: int, end: int) -> memoryview:
        return self.data[begin:end]

    def close(self) -> None:
        """Does nothing: all is copied already."""


class StagingBuffer:
    """Host memory for one save at a time, laid out as the rank's data file, or for one piece of it."""

    def __init__(self, piece_bytes: int = PIECE_BYTES) -> None:
        """`piece_bytes`, a multiple of BLOCK_BYTES: how large pieces are, if there is no room for the whole file."""
        if piece_bytes % BLOCK_BYTES:
            raise ValueError(f"piece_bytes has to be a multiple of {BLOCK_BYTES}")
        self._piece_bytes = piece_bytes
        self._memory = SharedMemory.of(1)  # a mapping can't be empty
        self._plan: RankPlan | None = None
        self._targets: list[torch.Tensor] = []

    @property
    def memory(self) -> SharedMemory:
        """Where the next save is staged, unless it needs more."""
        return self._memory

    def prepare(self, plan: RankPlan, room: float = math.inf) -> None:
        """Allocate memory for `plan` and touch its pages. The next `stage` then only copies.

        Args:
            plan: What is to be written.
            room: Bytes that may be allocated. If they are too few, `plan` is staged in pieces.
        """
        if plan is self._plan:
            return
        if self._memory.content.numel() < plan.size:
            self._memory = SharedMemory.of(plan.size if plan.size <= room else min(plan.size, self._piece_bytes))
        self._plan = plan
        self._targets = (
            []
            if self.is_in_pieces
            else [
                self._memory.content[entry.chunk.begin : entry.chunk.end]
                .view(DTYPES[entry.dtype])
                .view(entry.chunk.lengths)
                for entry in plan.entries
            ]
        )

    @property
    def size(self) -> int:
        """Bytes of what is to be written."""
        return self._plan.size if self._plan is not None else 0

    @property
    def is_in_pieces(self) -> bool:
        """Whether the memory is too small for what is to be written."""
        return self._memory.content.numel() < self.size

    def stage(self, plan: RankPlan, tensors: Tensors) -> Staged:
        """Copy what `plan` writes. The bytes are valid until the next call."""
        self.prepare(plan)
        sources = written_tensors(plan, tensors)
        for target, source in zip(self._targets, sources, strict=True):
            target.copy_(source, non_blocking=source.is_cuda)
        synchronize(sources)  # the next step may overwrite a source as soon as this returns
        return Staged(self._memory, self._memory.content[: plan.size].numpy().data)

    def stage_within(self, room: float, plan: RankPlan, tensors: Tensors) -> Staged | StagedPieces:
        """As `stage`, but in pieces if `room` is too small for all. They are copied as they are asked for."""
        self.prepare(plan, room)
        if not self.is_in_pieces:
            return self.stage(plan, tensors)
        sources = written_tensors(plan, tensors)
        synchronize(sources)  # they are copied from a different thread
        return StagedPieces(plan, sources, self._memory.content)


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
