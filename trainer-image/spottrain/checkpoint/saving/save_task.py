"""One rank's part of a save after staging.

It uploads and writes a receipt. Rank 0 also writes the manifest and commits.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Any

from spottrain.checkpoint.errors import CheckpointError, SaveFailed, StorageError, StorageFull, error_to_json
from spottrain.checkpoint.format.attempt import Attempt, collect_receipts
from spottrain.checkpoint.format.commits import Commit
from spottrain.checkpoint.format.frozen_files import FrozenFiles
from spottrain.checkpoint.format.head import commit
from spottrain.checkpoint.format.manifest import (
    DataFile,
    Receipt,
    build_manifest,
    data_key,
    frozen_key,
    receipt_key,
    serialise,
)
from spottrain.checkpoint.saving.save_handle import SaveHandle
from spottrain.checkpoint.stores.storage import CheckpointStorage

logger = logging.getLogger(__name__)


def _now() -> datetime:
    return datetime.now(UTC)


@dataclass(frozen=True, slots=True, kw_only=True)
class SaveTask:
    """One rank's part of a save after staging: upload and receipt.

    Rank 0 also commits.
    """

    storage: CheckpointStorage
    attempt: Attempt
    handle: SaveHandle
    write: Callable[[str], DataFile]
    """Stores the staged bytes under a key."""
    write_frozen: Callable[[str], DataFile] | None = None
    """The same for frozen weights, if this rank writes any."""
    frozen_files: FrozenFiles = field(default_factory=FrozenFiles)
    """On rank 0: frozen weights in older attempts that this save refers to."""
    receipt: Receipt
    tree: Any
    extra: Any
    resumed_from_step: int | None
    receipts_timeout_seconds: float
    committed: Callable[[], None] = lambda: None
    """Hears of the commit, before `handle` does."""
    clean_up: Callable[[], None] | None
    """Starts a clean-up, after a commit."""
    make_room: Callable[[], None] | None = None
    """Starts a clean-up after a save that was given up, maybe because the store is full. Otherwise, what older
    generations left unfinished and commits that aren't kept any more would stay until a save succeeds."""
    now: Callable[[], datetime] = _now

    def run(self) -> None:
        error: CheckpointError | None = SaveFailed(f"The checkpoint at step {self.attempt.step} was interrupted.")
        try:
            error = self._outcome()
        finally:
            self.handle.finish(error)  # in any case: otherwise each later save would find this one under way
        if error is None and self.clean_up is not None:
            self.clean_up()

    def _outcome(self) -> CheckpointError | None:
        try:
            self._save()
        except CheckpointError as error:
            failure = error
        except Exception as error:
            # In the background, nobody else would see it.
            logger.exception("The checkpoint at step %d failed", self.attempt.step)
            failure = SaveFailed(f"The checkpoint at step {self.attempt.step} failed: {error!r}.")
        else:
            return None
        logger.warning("%s", failure)
        self._give_up(failure)
        return failure

    def _save(self) -> None:
        started = time.monotonic()
        self._upload()
        uploaded = time.monotonic()
        self.handle.upload_seconds = uploaded - started
        if self.receipt.rank == 0:
            self.handle.commit = self._commit(uploaded + self.receipts_timeout_seconds)
            self.committed()
            self.handle.commit_seconds = time.monotonic() - uploaded

    def _upload(self) -> None:
        rank, prefix = self.receipt.rank, self.attempt.prefix
        frozen = self.write_frozen(frozen_key(prefix, rank)) if self.write_frozen is not None else None
        file = self.write(data_key(prefix, rank))
        receipt, _ = serialise(self.receipt.model_copy(update={"file": file, "frozen": frozen}))
        self.storage.put(receipt_key(prefix, rank), receipt)

    def _commit(self, deadline: float) -> Commit:
        receipts = collect_receipts(
            self.storage, self.attempt, self.receipt.world_size, deadline=deadline, pause=self.handle.pause
        )
        self.frozen_files.check(self.storage)
        frozen_files = self.frozen_files.joined(FrozenFiles.written(self.attempt.prefix, receipts))
        manifest = build_manifest(
            receipts,
            frozen_files=frozen_files.files,
            frozen_tensors=frozen_files.beyond(len(receipts)),
            generation=self.attempt.generation,
            step=self.attempt.step,
            tree=self.tree,
            extra=self.extra,
            saved_at=self.now().isoformat(timespec="milliseconds"),
        )
        data, sha256 = serialise(manifest)
        new = Commit(
            generation=self.attempt.generation,
            step=self.attempt.step,
            attempt=self.attempt.prefix,
            manifest_sha256=sha256,
            committed_at=manifest.saved_at,
            needs=manifest.needs(self.attempt.prefix),
        )
        self.storage.upload(new.manifest, data)
        self.handle.proposed, self.handle.frozen_files = new, frozen_files
        commit(self.storage, new, resumed_from_step=self.resumed_from_step)
        return new

    def _give_up(self, error: CheckpointError) -> None:
        """On rank 0, make room; on other ranks, report the failure to rank 0.

        The report goes through the store. Without it, rank 0 would wait for the deadline.
        """
        try:
            if self.receipt.rank != 0:
                self._report(error)
            # A store that doesn't answer would not answer this, either.
            elif isinstance(error, StorageFull) or not isinstance(error, StorageError):
                self._discard()
                if self.make_room is not None:
                    self.make_room()
        except CheckpointError as second:
            logger.warning(
                "Clean-up after the failed checkpoint at step %d failed, too: %s", self.attempt.step, second
            )
        except Exception:
            logger.exception("Clean-up after the failed checkpoint at step %d failed, too", self.attempt.step)

    def _report(self, error: CheckpointError) -> None:
        failure = Receipt(
            rank=self.receipt.rank, world_size=self.receipt.world_size, error=tuple(error_to_json(error))
        )
        self.storage.put(receipt_key(self.attempt.prefix, failure.rank), serialise(failure)[0])

    def _discard(self) -> None:
        """Delete what the ranks have written.

        Otherwise, failed saves would fill up a store that is nearly full.
        """
        if self.handle.proposed is None:
            self.storage.delete([key for key, _ in self.storage.list(self.attempt.prefix)])
