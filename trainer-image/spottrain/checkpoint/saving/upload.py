"""How a rank's part of a save gets to the store: its data, then its receipt."""

from __future__ import annotations

import logging

from spottrain.checkpoint.errors import CheckpointError, SaveFailed, error_to_json
from spottrain.checkpoint.format.attempt import Attempt
from spottrain.checkpoint.format.head import read_head
from spottrain.checkpoint.format.manifest import (
    BLOCK_BYTES,
    DataFile,
    Entry,
    Receipt,
    data_key,
    frozen_key,
    receipt_key,
    serialise,
)
from spottrain.checkpoint.saving.parts import StagedPart
from spottrain.checkpoint.saving.pieces import StagedPieces
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
        """Connect rank and writer process to the store ahead of the first save. The writer also maps the memory."""
        try:
            if (writer := self._writer) is not None:
                writer.prepare(memory.descriptor)
            read_head(self._storage)
        except WriterLost as error:
            self._lose_writer(error)
        except CheckpointError as error:
            logger.info("Connecting to the checkpoint store ahead of the first save failed: %s", error)

    def store(self, attempt: Attempt, part: StagedPart) -> None:
        """Store the rank's data, and leave its receipt. Raises CheckpointError."""
        prefix, rank, frozen = attempt.prefix, part.receipt.rank, part.frozen.staged
        files = {"frozen": self.write(frozen, frozen_key(prefix, rank)) if frozen is not None else None}
        files["file"] = self.write(part.data, data_key(prefix, rank))
        if part.is_tried:
            self._read_back(data_key(prefix, rank), part)
        self._put_receipt(attempt, part.receipt.model_copy(update=files))

    def _read_back(self, key: str, part: StagedPart) -> None:
        """Read the smallest tensor of each kind, or its first block.

        Raises SaveFailed if the store holds something else.
        """
        kinds = {
            (e.dtype, e.fqn.rpartition(".")[2]): e for e in sorted(part.receipt.entries, key=_size, reverse=True)
        }
        for entry in kinds.values():
            begin, found = entry.chunk.begin, bytearray(min(_size(entry), BLOCK_BYTES))
            length = self._storage.read_into(key, begin, memoryview(found)) if found else 0
            if length != len(found) or found != part.data.content(begin, begin + len(found)):
                raise SaveFailed(
                    f"The store gives other bytes for {entry.fqn} in {key} than were just written, so that no resume "
                    "could read the checkpoint. See what else writes there, or changes what is read."
                )

    def report(self, attempt: Attempt, receipt: Receipt, error: CheckpointError) -> None:
        """Leave a receipt that says why the rank's part is not stored. Raises CheckpointError."""
        reason = tuple(error_to_json(error))
        self._put_receipt(attempt, Receipt(rank=receipt.rank, world_size=receipt.world_size, error=reason))

    def _put_receipt(self, attempt: Attempt, receipt: Receipt) -> None:
        self._storage.put(receipt_key(attempt.prefix, receipt.rank), serialise(receipt)[0])

    def write(self, staged: Staged | StagedPieces, key: str) -> DataFile:
        """Store the staged bytes. Raises CheckpointError."""
        if isinstance(staged, StagedPieces):
            return write(self._storage, staged, key)  # training waits, so that no process beside it is of use
        if (writer := self._writer) is not None and len(staged.data):
            try:
                return writer.write(key, staged.memory.descriptor, len(staged.data))
            except WriterLost as error:
                self._lose_writer(error)
        return write(self._storage, staged.data, key)

    def _lose_writer(self, error: WriterLost) -> None:
        logger.warning("%s Rank %d writes its checkpoints itself from now on.", error, self._rank)
        self._writer = None


def _size(entry: Entry) -> int:
    return entry.chunk.end - entry.chunk.begin
