"""Which commits are kept, and clean-up that can't delete what may still be needed.

An attempt is deleted only for what is known about it (HEAD dropped it, or nobody who could still commit it
is left), never because something is missing. Its frozen weights stay for as long as a commit refers to them.
"""

from __future__ import annotations

import logging
import threading
from dataclasses import dataclass

from spottrain.checkpoint.background import BackgroundThread
from spottrain.checkpoint.errors import CheckpointError
from spottrain.checkpoint.format.attempt import ATTEMPTS, Attempt
from spottrain.checkpoint.format.commits import Commit, Head
from spottrain.checkpoint.format.head import prune
from spottrain.checkpoint.format.manifest import FROZEN_SUFFIX
from spottrain.checkpoint.stores.storage import CheckpointStorage

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class Retention:
    """Keep the newest `last` commits (at least one) and the first at or after each multiple of `every`, as few fall
    on one: not those by the clock, nor those of drains."""

    last: int = 2
    every: int | None = None

    def kept(self, commits: tuple[Commit, ...]) -> set[str]:
        """The attempts to keep of `commits`, which are newest first."""
        newest = commits[: max(self.last, 1)]
        milestones = {c.step // self.every: c for c in commits if c.step >= self.every} if self.every else {}
        return {commit.attempt for commit in (*newest, *milestones.values())}


def clean_up(storage: CheckpointStorage, generation: int, retention: Retention) -> int:
    """Drop what `retention` doesn't keep and what unfinished saves left; the number of objects deleted.

    HEAD is changed before anything is deleted, so it never names what is gone. Raises Fenced, having
    deleted nothing, if a newer generation has taken over.
    """
    head = prune(storage, generation, retention.kept)

    def is_over(key: str) -> bool:
        attempt = Attempt.of_key(key)
        if attempt is None or not _is_over(attempt, head):
            return False
        return not (key.endswith(FROZEN_SUFFIX) and head.holds(attempt.prefix))

    def is_settled(key: str) -> bool:
        # Nobody uploads to a commit any more: what is unfinished there is of a writer that was lost, and replaced.
        attempt = Attempt.of_key(key)
        return is_over(key) or (attempt is not None and head.holds(attempt.prefix))

    over = [key for key, _ in storage.list(ATTEMPTS) if is_over(key)]
    storage.delete(over)
    return len(over) + storage.abandon_uploads(ATTEMPTS, is_settled)


class BackgroundCleanUp:
    """Cleans up beside the training and the saves, which may need their thread for the next one."""

    def __init__(self, storage: CheckpointStorage, generation: int, retention: Retention) -> None:
        self._storage = storage
        self._generation = generation
        self._retention = retention
        self._background = BackgroundThread("clean-up")
        self._waiting = threading.Event()

    def start(self) -> None:
        """Returns at once. One that is under way is followed by one more, however often this is called meanwhile."""
        if not self._waiting.is_set():
            self._waiting.set()
            self._background.submit(self._run)

    def _run(self) -> None:
        self._waiting.clear()
        try:
            clean_up(self._storage, self._generation, self._retention)
        except CheckpointError as error:
            # What is left over costs space only; the next clean-up finds it again.
            logger.warning("Old checkpoints could not be deleted: %s", error)


def _is_over(attempt: Attempt, head: Head) -> bool:
    """Whether no commit is, or can ever become, this attempt."""
    newest = head.newest
    if newest is None or any(commit.attempt == attempt.prefix for commit in head.commits):
        return False
    if attempt.generation < head.fence:
        return True
    # The same generation saves one step at a time, upwards.
    return attempt.generation == newest.generation and attempt.step < newest.step
