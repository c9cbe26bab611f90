"""The way of staged bytes to the store."""

from __future__ import annotations

import logging

from spottrain.checkpoint.errors import CheckpointError
from spottrain.checkpoint.format.head import read_head
from spottrain.checkpoint.format.manifest import DataFile
from spottrain.checkpoint.saving.staging import SharedMemory, Staged
from spottrain.checkpoint.saving.writer import WriterLost, WriterProcess, write
from spottrain.checkpoint.stores.storage import CheckpointStorage

logger = logging.getLogger(__name__)


class Upload:
    """Uploads by the writer process or, after that has ended, from this rank."""

    def __init__(self, storage: CheckpointStorage, writer: WriterProcess | None, *, rank: int) -> None:
        self._storage = storage
        self._writer = writer
        self._rank = rank

    def connect(self, memory: SharedMemory) -> None:
        """Connect rank and writer process to the store ahead of the first save.

        The writer also maps the memory.
        """
        try:
            if (writer := self._writer) is not None:
                writer.prepare(memory.descriptor)
            read_head(self._storage)
        except WriterLost as error:
            self._lose_writer(error)
        except CheckpointError as error:
            logger.info("Connecting to the checkpoint store ahead of the first save failed: %s", error)

    def write(self, staged: Staged, key: str) -> DataFile:
        """Store the staged bytes. Raises CheckpointError."""
        if (writer := self._writer) is not None and len(staged.data):
            try:
                return writer.write(key, staged.memory.descriptor, len(staged.data))
            except WriterLost as error:
                self._lose_writer(error)
        return write(self._storage, staged.data, key)

    def _lose_writer(self, error: WriterLost) -> None:
        logger.warning("%s Rank %d writes its checkpoints itself from now on.", error, self._rank)
        self._writer = None
