"""Rank 0's part of saves: the manifest, the commit, and the clean-ups that follow."""

from __future__ import annotations

from collections.abc import Callable
from datetime import UTC, datetime

from spottrain.checkpoint.format.attempt import Attempt, collect_receipts
from spottrain.checkpoint.format.commits import Commit
from spottrain.checkpoint.format.described import described
from spottrain.checkpoint.format.frozen_files import FrozenFiles
from spottrain.checkpoint.format.head import commit
from spottrain.checkpoint.format.manifest import build_manifest, read_manifest, serialise
from spottrain.checkpoint.saving.parts import StagedPart
from spottrain.checkpoint.saving.retention import BackgroundCleanUp, Retention, clean_up
from spottrain.checkpoint.saving.save_handle import SaveHandle
from spottrain.checkpoint.stores.storage import CheckpointStorage


class Committer:
    """Commits what all ranks have stored, and deletes what is no longer needed.

    Attributes:
        resumed_from_step: The step that the generation resumed from. None once a save since then has committed.
    """

    def __init__(
        self,
        storage: CheckpointStorage,
        generation: int,
        retention: Retention | None,
        *,
        now: Callable[[], datetime] = lambda: datetime.now(UTC),
    ) -> None:
        """Without `retention`, there are no clean-ups in the background."""
        self._storage = storage
        self._generation = generation
        self._clean_up = BackgroundCleanUp(storage, generation, retention) if retention is not None else None
        self._now = now
        self.resumed_from_step: int | None = None

    def commit(self, attempt: Attempt, part: StagedPart, handle: SaveHandle, *, deadline: float) -> None:
        """Wait for the ranks' receipts, write the manifest, and move HEAD. Sets `handle.commit`.

        Raises CheckpointError.
        """
        receipts = collect_receipts(
            self._storage, attempt, part.receipt.world_size, deadline=deadline, pause=handle.pause
        )
        part.frozen.kept.check(self._storage)
        frozen_files = part.frozen.kept.joined(FrozenFiles.written(attempt.prefix, receipts))
        manifest = build_manifest(
            receipts,
            frozen_files=frozen_files.files,
            frozen_tensors=frozen_files.beyond(len(receipts)),
            generation=attempt.generation,
            step=attempt.step,
            tree=part.tree,
            extra=part.extra,
            saved_at=self._now().isoformat(timespec="milliseconds"),
        )
        data, sha256 = serialise(manifest)
        new = Commit(
            generation=attempt.generation,
            step=attempt.step,
            attempt=attempt.prefix,
            manifest_sha256=sha256,
            committed_at=manifest.saved_at,
            needs=manifest.needs(attempt.prefix),
        )
        self._storage.upload(new.manifest, data)
        if part.is_tried:
            described(read_manifest(self._storage, new))  # as a resume begins
        handle.proposed, handle.frozen_files = new, frozen_files
        commit(self._storage, new, resumed_from_step=self.resumed_from_step)
        self.resumed_from_step = None
        handle.commit = new

    def give_up(self, attempt: Attempt, handle: SaveHandle) -> None:
        """Delete what the ranks have written, unless HEAD may name it, and start a clean-up.

        Otherwise, failed saves would fill up a store that is nearly full. What older generations left unfinished and
        commits that aren't kept any more would stay until a save succeeds.
        """
        if handle.proposed is None:
            self._storage.delete([key for key, _ in self._storage.list(attempt.prefix)])
        self.start_clean_up()

    def start_clean_up(self) -> None:
        """Start a clean-up in the background, and return at once."""
        if self._clean_up is not None:
            self._clean_up.start(self.resumed_from_step)

    @property
    def clean_up_failure(self) -> str | None:
        """Why the last clean-ups in the background failed, once several have in a row."""
        return self._clean_up.failure if self._clean_up is not None else None

    def clean_up(self, retention: Retention, seconds: float) -> int:
        """Clean up for so many seconds at most. Returns the number of objects that were deleted."""
        return clean_up(
            self._storage, self._generation, retention, resumed_from_step=self.resumed_from_step, seconds=seconds
        )
