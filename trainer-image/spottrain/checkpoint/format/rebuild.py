"""HEAD rebuilt, if it is missing or damaged, from the attempts that are whole.

An attempt has a manifest only after every rank has left its receipt. So training can resume from it, whether HEAD had
named it or not. The newest attempt is that of the highest step of the newest generation.
"""

from __future__ import annotations

import hashlib
import logging

from spottrain.checkpoint.errors import CorruptCheckpoint, ObjectNotFound
from spottrain.checkpoint.format.attempt import ATTEMPTS, Attempt
from spottrain.checkpoint.format.commits import Commit, Head, manifest_key
from spottrain.checkpoint.format.manifest import Manifest
from spottrain.checkpoint.stores.storage import CheckpointStorage
from spottrain_runtime.wording import one_line

logger = logging.getLogger(__name__)


def rebuild(storage: CheckpointStorage) -> Head | None:
    """Make a HEAD whose commits are all complete attempts. Changes nothing in the store.

    Returns:
        The rebuilt HEAD, or None if no attempt is complete.

    Raises:
        CheckpointMismatch: The attempts have an unknown version of the format.
    """
    sizes = dict(storage.list(ATTEMPTS))
    attempts = {attempt for key in sizes if (attempt := Attempt.of_key(key)) is not None}
    newest_first = sorted(attempts, key=lambda attempt: (attempt.generation, attempt.step), reverse=True)
    whole = (_whole(storage, attempt, sizes) for attempt in newest_first)
    commits = tuple(commit for commit in whole if commit is not None)
    if not commits:
        return None
    logger.warning(
        "HEAD of the checkpoint store is missing or damaged. It is rebuilt from %d whole checkpoints, the newest of "
        "step %d.",
        len(commits),
        commits[0].step,
    )
    return Head(fence=newest_first[0].generation, commits=commits, rebuilt=True)


def _whole(storage: CheckpointStorage, attempt: Attempt, sizes: dict[str, int]) -> Commit | None:
    """The attempt as a commit, if it is whole.

    It is whole if its manifest is what was written, and each file in it has its size.
    """
    if manifest_key(attempt.prefix) not in sizes:
        return None
    try:
        data, _ = storage.get(manifest_key(attempt.prefix))
        manifest = Manifest.parse(data, manifest_key(attempt.prefix))
    except (ObjectNotFound, CorruptCheckpoint) as error:
        logger.warning("The checkpoint at step %d is passed over. %s", attempt.step, one_line(str(error)))
        return None
    if (manifest.generation, manifest.step) != (attempt.generation, attempt.step):
        return None
    files = {manifest.key(attempt.prefix, n): manifest.file(n).size for n in range(manifest.num_files)}
    if any(sizes.get(key, 0) != size for key, size in files.items()):
        return None
    return Commit(
        generation=manifest.generation,
        step=manifest.step,
        attempt=attempt.prefix,
        manifest_sha256=hashlib.sha256(data).hexdigest(),
        committed_at=manifest.saved_at,
        needs=manifest.needs(attempt.prefix),
    )
