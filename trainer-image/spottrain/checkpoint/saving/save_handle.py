"""What the training loop knows about a save that runs in the background."""

from __future__ import annotations

import threading

from spottrain.checkpoint.errors import CheckpointError, RankFailed, SaveFailed, error_to_json
from spottrain.checkpoint.format.commits import Commit
from spottrain.checkpoint.format.frozen_files import FrozenFiles
from spottrain.checkpoint.format.head import read_head
from spottrain.checkpoint.stores.storage import CheckpointStorage


class SaveHandle:
    """A save under way, and what it cost."""

    def __init__(self, step: int, size: int, staging_seconds: float, *, writes_frozen_weights: bool = False) -> None:
        self.step = step
        self.bytes = size
        """Bytes that this rank writes."""
        self.writes_frozen_weights = writes_frozen_weights
        """Whether this save writes frozen weights, so that the ranks write more than with the next saves."""
        self.staging_seconds = staging_seconds
        """How long the training loop waited: for agreement, plan and copies and, if staged in pieces, the upload."""
        self.upload_seconds: float | None = None
        """From the end of staging until this rank's data and receipt were stored; 0 if staged in pieces."""
        self.commit_seconds: float | None = None
        """On rank 0: from then until HEAD named the checkpoint, including the wait for the other ranks."""
        self.commit: Commit | None = None
        """Known on rank 0 and, after a synchronous save, on every rank."""
        self.frozen_files: FrozenFiles | None = None
        """On rank 0: the frozen weights that `proposed` refers to."""
        self.proposed: Commit | None = None
        """On rank 0: the commit that it proposed for HEAD. HEAD may name it, even if the save has failed."""
        self.error: CheckpointError | None = None
        self.given_up: CheckpointError | None = None
        """Why other ranks' parts failed, once the ranks have exchanged it."""
        self._gave_up = threading.Event()
        self._stored = threading.Event()
        self._finished = threading.Event()

    @property
    def done(self) -> bool:
        """Whether this rank's part has ended, successfully or not."""
        return self._finished.is_set()

    def wait(self, timeout_seconds: float | None = None) -> Commit | None:
        """Wait until this rank's part has ended. Raises the CheckpointError that the save ended with."""
        if not self._finished.wait(timeout_seconds):
            raise SaveFailed(f"The checkpoint at step {self.step} was not finished within {timeout_seconds} s.")
        if self.error is not None:
            raise self.error
        return self.commit

    def join(self, timeout_seconds: float | None = None) -> None:
        """Wait until this rank's part has ended, or until the time is over. The part may end successfully or not."""
        self._finished.wait(timeout_seconds)

    def stored(self, seconds: float, *, in_pieces: bool) -> None:
        """This rank's data and receipt are stored, after `seconds`."""
        if in_pieces:
            self.staging_seconds += seconds
        self.upload_seconds = 0.0 if in_pieces else seconds
        self._stored.set()

    def join_storing(self) -> None:
        """Wait until this rank's data is stored, or its part has failed."""
        self._stored.wait()

    def give_up(self, error: CheckpointError) -> None:
        """Stop waiting for receipts that won't come. It changes nothing if all of them were there already."""
        self.given_up = error
        self._gave_up.set()

    def raise_failure(self, rank: int) -> None:
        """Raises why the part of this rank has failed, if so. The part of rank 0 needs no giving up."""
        if rank != 0 and self.error is not None:
            raise RankFailed(self.step, rank, error_to_json(self.error))

    def pause(self, seconds: float) -> None:
        """Wait so long. Raises the error of `give_up` as soon as it is called."""
        if self._gave_up.wait(seconds) and self.given_up is not None:
            raise self.given_up

    def finish(self, error: CheckpointError | None = None) -> None:
        """Set the end of the save. The save itself calls this once."""
        self.error = error
        self._finished.set()
        self._stored.set()


def was_committed(storage: CheckpointStorage, failed: SaveHandle) -> bool:
    """Whether HEAD names the commit for which the store gave no answer.

    Then it is a commit like any other. Raises CheckpointError if HEAD can't be read: a new save of this step would be
    refused as behind that commit.
    """
    head = read_head(storage) if failed.proposed is not None else None
    if head is not None and failed.proposed in head.commits:
        failed.commit, failed.error = failed.proposed, None
    return failed.error is None
