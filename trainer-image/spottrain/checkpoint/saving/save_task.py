"""One rank's part of a save after staging: it stores the part and, on rank 0, commits."""

from __future__ import annotations

import logging
import time
from dataclasses import dataclass

from spottrain.checkpoint.errors import CheckpointError, SaveFailed, StorageError, StorageFull
from spottrain.checkpoint.format.attempt import Attempt
from spottrain.checkpoint.saving.committer import Committer
from spottrain.checkpoint.saving.parts import StagedPart
from spottrain.checkpoint.saving.save_handle import SaveHandle
from spottrain.checkpoint.saving.upload import Upload

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class SaveTask:
    """One rank's part of a save after staging.

    Attributes:
        attempt: Where it is stored.
        handle: What the training loop knows about it.
        part: What this rank has staged.
        upload: Stores the part.
        committer: Commits the save; only on rank 0.
        receipts_timeout_seconds: How long rank 0 waits for the other ranks' receipts.
        is_followed_by_clean_up: Whether a clean-up follows the commit.
    """

    attempt: Attempt
    handle: SaveHandle
    part: StagedPart
    upload: Upload
    committer: Committer | None
    receipts_timeout_seconds: float
    is_followed_by_clean_up: bool = False

    def run(self) -> None:
        error: CheckpointError | None = SaveFailed(f"The checkpoint at step {self.attempt.step} was interrupted.")
        try:
            error = self._outcome()
        finally:
            self.handle.finish(error)  # in any case: otherwise each later save would find this one under way
        if error is None and self.is_followed_by_clean_up and self.committer is not None:
            self.committer.start_clean_up()

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
        self.upload.store(self.attempt, self.part)
        uploaded = time.monotonic()
        self.handle.stored(uploaded - started, in_pieces=self.part.is_in_pieces)
        if self.committer is not None:
            deadline = uploaded + self.receipts_timeout_seconds
            self.committer.commit(self.attempt, self.part, self.handle, deadline=deadline)
            self.handle.commit_seconds = time.monotonic() - uploaded

    def _give_up(self, error: CheckpointError) -> None:
        """On rank 0, make room. On other ranks, report the failure to rank 0, which would wait for the deadline."""
        try:
            if self.committer is None:
                self.upload.report(self.attempt, self.part.receipt, error)
            # A store that doesn't answer would not answer this, either.
            elif isinstance(error, StorageFull) or not isinstance(error, StorageError):
                self.committer.give_up(self.attempt, self.handle)
        except CheckpointError as second:
            logger.warning(
                "Clean-up after the failed checkpoint at step %d failed, too: %s", self.attempt.step, second
            )
        except Exception:
            logger.exception("Clean-up after the failed checkpoint at step %d failed, too", self.attempt.step)
