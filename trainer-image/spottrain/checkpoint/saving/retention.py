"""Which commits are kept, and a clean-up that can't delete a needed one.

An attempt is deleted only for what is known about it, never because something is missing: HEAD dropped it, or no
process is left that could still commit it. Its frozen weights stay as long as a commit refers to them.
"""

from __future__ import annotations

import logging
import math
import threading
import time
from dataclasses import dataclass
from functools import partial

from spottrain.checkpoint.background import BackgroundThread
from spottrain.checkpoint.errors import CheckpointError, CleanUpFailed, Fenced, StorageError
from spottrain.checkpoint.format.attempt import ATTEMPTS, Attempt, start_of
from spottrain.checkpoint.format.commits import Commit, Head
from spottrain.checkpoint.format.head import prune
from spottrain.checkpoint.format.manifest import FROZEN_SUFFIX
from spottrain.checkpoint.stores.storage import CheckpointStorage

logger = logging.getLogger(__name__)

# Objects that are deleted between two looks at the clock: what S3 deletes by one request.
_BATCH = 1000
# One failure may be that of a store that was down for a moment.
_FAILURES_TO_REPORT = 2


@dataclass(frozen=True, slots=True, kw_only=True)
class Retention:
    """Which commits to keep: the newest ones, and milestones.

    A milestone is the first commit at or after a multiple of `every`, because few commits fall on a multiple: neither
    those that the clock sets off nor those of drains do.
    """

    last: int = 2
    every: int | None = None

    def kept(self, commits: tuple[Commit, ...], resumed_from_step: int | None = None) -> set[str]:
        """The prefixes of the attempts to keep.

        Args:
            commits: Those that HEAD names, newest first.
            resumed_from_step: The step that the generation resumed from. None once it has committed. Newer commits
                stay until then, but take no place of a whole one: the generation passed over them, as damaged.
        """
        base = math.inf if resumed_from_step is None else resumed_from_step
        passed_over = [c for c in commits if c.step > base]
        counted = [c for c in commits if c.step <= base]
        newest = counted[: max(self.last, 1)]
        milestones = {c.step // self.every: c for c in counted if c.step >= self.every} if self.every else {}
        return {commit.attempt for commit in (*passed_over, *newest, *milestones.values())}


def clean_up(
    storage: CheckpointStorage,
    generation: int,
    retention: Retention,
    *,
    resumed_from_step: int | None = None,
    seconds: float = math.inf,
) -> int:
    """Drop old commits, and delete what unfinished saves have left.

    Old commits are those that `retention` doesn't keep. HEAD changes before anything is deleted, so that it never
    names what is gone.

    Args:
        storage: The store.
        generation: The generation that cleans up.
        retention: Which commits to keep.
        resumed_from_step: The step that the generation resumed from. None once it has committed.
        seconds: After how long to stop deleting. The next clean-up finds what is left.

    Returns:
        The number of objects that were deleted.

    Raises:
        Fenced: A newer generation has taken over. Nothing was deleted.
        CleanUpFailed: The store refuses to delete. The message says how many bytes stay.
    """
    deadline = time.monotonic() + seconds
    head = prune(storage, generation, partial(retention.kept, resumed_from_step=resumed_from_step))
    # A long run may keep hundreds of commits, of many objects each.
    commits = {commit.attempt for commit in head.commits}
    held = head.held()

    def is_over(key: str) -> bool:
        attempt = Attempt.of_key(key)
        if attempt is None or attempt.prefix in commits or not _is_over(attempt, head):
            return False
        return not (key.endswith(FROZEN_SUFFIX) and attempt.prefix in held)

    def is_settled(key: str) -> bool:
        # Nobody uploads to a commit any more. An unfinished upload there is that of a writer that was lost.
        attempt = Attempt.of_key(key)
        return is_over(key) or (attempt is not None and attempt.prefix in held)

    sizes = {key: size for key, size in storage.list(ATTEMPTS) if is_over(key)}
    over = list(sizes)
    for begin in range(0, len(over), _BATCH):
        deleted = over[: begin + _BATCH]
        try:
            storage.delete(deleted[begin:])
        except StorageError as error:
            left = sum(sizes[key] for key in over[begin:])
            raise CleanUpFailed(
                f"{left / 1e6:,.1f} MB of old or unfinished checkpoints stay in the store, as they can't be deleted: "
                f"{error}"
            ) from error
        if len(deleted) < len(over) and time.monotonic() >= deadline:
            logger.warning(
                "Deleting old checkpoints takes more than %.0f s. The next clean-up deletes the other %d objects.",
                seconds,
                len(over) - len(deleted),
            )
            return len(deleted)
    return len(over) + storage.abandon_uploads(ATTEMPTS, is_settled)


class BackgroundCleanUp:
    """Cleans up in a thread of its own. The next save may need the thread of the saves."""

    def __init__(self, storage: CheckpointStorage, generation: int, retention: Retention) -> None:
        self._storage = storage
        self._generation = generation
        self._retention = retention
        self._background = BackgroundThread("clean-up")
        self._waiting = threading.Event()
        self._resumed_from_step: int | None = None
        self._failures = 0
        self.failure: str | None = None
        """Why the last clean-ups failed, once several have in a row."""

    def start(self, resumed_from_step: int | None = None) -> None:
        """Start a clean-up, and return at once. While one runs, any number of calls starts only one more.

        Args:
            resumed_from_step: The step that the generation resumed from. None once it has committed.
        """
        self._resumed_from_step = resumed_from_step
        if not self._waiting.is_set():
            self._waiting.set()
            self._background.submit(self._run)

    def _run(self) -> None:
        self._waiting.clear()
        try:
            clean_up(self._storage, self._generation, self._retention, resumed_from_step=self._resumed_from_step)
        except CheckpointError as error:
            # Objects that remain only cost space. The next clean-up finds them again.
            logger.warning("A clean-up of the checkpoint store failed. %s", error)
            self._failures += 1
            if self._failures >= _FAILURES_TO_REPORT and not isinstance(error, Fenced):
                self.failure = str(error)
        else:
            self._failures, self.failure = 0, None


def _is_over(attempt: Attempt, head: Head) -> bool:
    """Whether this attempt, which is not a commit, can't become one any more."""
    newest = head.newest
    if newest is None:
        return False
    if attempt.generation < head.fence:
        return True
    if attempt.generation != newest.generation:
        return False
    # A generation saves one step at a time, and steps only go up. If it was started twice, the other start may still
    # upload the newest step, and its commit ends it as fenced.
    is_retried = attempt.step == newest.step and start_of(attempt.prefix) == start_of(newest.attempt)
    return attempt.step < newest.step or is_retried
