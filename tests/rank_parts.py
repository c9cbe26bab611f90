"""Parts that single ranks have in a save, without the ranks."""

from __future__ import annotations

from memory_storage import MemoryStorage
from spottrain.checkpoint.format.attempt import Attempt
from spottrain.checkpoint.format.manifest import Receipt
from spottrain.checkpoint.saving.committer import Committer
from spottrain.checkpoint.saving.frozen import FrozenPart
from spottrain.checkpoint.saving.parts import StagedPart
from spottrain.checkpoint.saving.save_handle import SaveHandle
from spottrain.checkpoint.saving.save_task import SaveTask
from spottrain.checkpoint.saving.staging import SharedMemory, Staged
from spottrain.checkpoint.saving.upload import Upload


def staged_part(data: bytes, *, rank: int, world_size: int) -> StagedPart:
    """A rank's part of a save that has `data`, and no state besides."""
    memory = SharedMemory.of(len(data))
    staged = Staged(memory, memory.content.numpy().data)
    staged.data[:] = data
    receipt = Receipt(rank=rank, world_size=world_size)
    return StagedPart(receipt=receipt, data=staged, frozen=FrozenPart(), tree={}, extra={})


def save_task(storage: MemoryStorage, rank: int) -> SaveTask:
    """The part of one of two ranks in a save."""
    return SaveTask(
        attempt=Attempt.new(1, 10, "a"),
        handle=SaveHandle(10, 4, 0.0),
        part=staged_part(b"1234", rank=rank, world_size=2),
        upload=Upload(storage, None, rank=rank),
        committer=Committer(storage, 1, None) if rank == 0 else None,
        receipts_timeout_seconds=60.0,
    )
