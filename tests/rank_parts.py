"""Parts that single ranks have in a save, without the ranks."""

from __future__ import annotations

from functools import partial

from memory_storage import MemoryStorage
from spottrain.checkpoint.format.attempt import Attempt
from spottrain.checkpoint.format.manifest import Receipt
from spottrain.checkpoint.saving.save_handle import SaveHandle
from spottrain.checkpoint.saving.save_task import SaveTask
from spottrain.checkpoint.saving.writer import write


def save_task(storage: MemoryStorage, rank: int) -> SaveTask:
    """The part of one of two ranks in a save."""
    return SaveTask(
        storage=storage,
        attempt=Attempt.new(1, 10, "a"),
        handle=SaveHandle(10, 4, 0.0),
        write=partial(write, storage, memoryview(b"1234")),
        receipt=Receipt(rank=rank, world_size=2),
        tree={},
        extra={},
        resumed_from_step=None,
        receipts_timeout_seconds=60.0,
        clean_up=None,
    )
