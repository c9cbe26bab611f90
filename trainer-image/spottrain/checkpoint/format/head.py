"""HEAD: the one small object that says which checkpoints exist, and who may write the next.

Every change is a compare-and-swap of the whole object. An attempt that HEAD does not name is not a
checkpoint, however complete it looks; what HEAD names is complete, because it was verified first. Only where
HEAD itself is missing or damaged do complete attempts count: it is made anew from them.
"""

from __future__ import annotations

import time
from collections.abc import Callable

from spottrain.checkpoint.errors import (
    CorruptCheckpoint,
    Fenced,
    ObjectNotFound,
    PreconditionFailed,
    SharedWeightsGone,
    StepBehind,
    StorageUnavailable,
)
from spottrain.checkpoint.format.commits import Commit, Head
from spottrain.checkpoint.format.rebuild import rebuild
from spottrain.checkpoint.stores.storage import CheckpointStorage

HEAD_KEY = "HEAD"
_TRIES = 50


def read_head(storage: CheckpointStorage) -> Head | None:
    """What HEAD says now, or None where nothing was ever fenced or committed."""
    return _read(storage)[0]


def fence(storage: CheckpointStorage, generation: int) -> Head:
    """Shut older generations out; what HEAD says from then on. Raises Fenced if a newer one did so first."""

    def raise_fence(head: Head | None) -> Head:
        if head is None:
            return Head(fence=generation)
        _refuse_fenced(head, generation)
        return head.model_copy(update={"fence": generation})

    return _update(storage, raise_fence)


def commit(storage: CheckpointStorage, new: Commit, *, resumed_from_step: int | None = None) -> Head:
    """Make `new` the newest commit.

    Steps only go up, but for one case: a newer generation that resumed from an older kept commit, because
    those after it turned out to be damaged, drops these. A commit that HEAD names already is
    left as it is, so that asking again after an unclear outcome is safe. Frozen weights that `new` refers to must be
    held by a commit that HEAD names, as clean-up deletes others. Raises Fenced, StepBehind or SharedWeightsGone.
    """

    def add(head: Head | None) -> Head:
        if head is None:
            _refuse_unheld(Head(fence=new.generation), new)
            return Head(fence=new.generation, commits=(new,))
        is_known = any(kept.attempt == new.attempt for kept in head.commits)
        if head.rebuilt or not is_known:  # a HEAD made anew may name what was fenced before it was committed
            _refuse_fenced(head, new.generation)
        if is_known:
            return head
        _refuse_unheld(head, new)
        kept = _kept_before(head, new, resumed_from_step)
        return head.model_copy(update={"fence": new.generation, "commits": (new, *kept)})

    return _update(storage, add)


def prune(storage: CheckpointStorage, generation: int, keep: Callable[[tuple[Commit, ...]], set[str]]) -> Head:
    """Take commits off HEAD but those whose attempts `keep` returns, and never the newest."""

    def drop(head: Head | None) -> Head:
        if head is None:
            return Head(fence=generation)
        _refuse_fenced(head, generation)
        kept = keep(head.commits)
        left = tuple(c for c in head.commits if c is head.newest or c.attempt in kept)
        return head.model_copy(update={"commits": left})

    return _update(storage, drop)


def _kept_before(head: Head, new: Commit, resumed_from_step: int | None) -> tuple[Commit, ...]:
    """The commits that `new` comes on top of. One that was passed over goes at once, whatever the step of `new`:
    it would count for retention in place of one that is whole."""
    commits, newest = head.commits, head.newest
    if newest is None:
        return commits
    base = resumed_from_step
    if base is not None and new.generation > newest.generation and any(kept.step == base for kept in commits):
        commits = tuple(kept for kept in commits if kept.step <= base)
        newest = commits[0]
    if newest.step >= new.step:
        raise StepBehind(
            f"Step {new.step} of generation {new.generation} was not committed: generation "
            f"{newest.generation} has already committed step {newest.step}."
        )
    return commits


def _refuse_fenced(head: Head, generation: int) -> None:
    if head.fence > generation:
        raise Fenced(
            f"Generation {generation} may not commit any more: generation {head.fence} has taken over this job.",
            head.fence,
        )


def _refuse_unheld(head: Head, new: Commit) -> None:
    if not all(head.holds(prefix) for prefix in new.needs):
        raise SharedWeightsGone(
            f"Step {new.step} was not committed: no commit holds the frozen weights that it refers to any more. The "
            "next save writes them anew."
        )


def _update(storage: CheckpointStorage, change: Callable[[Head | None], Head]) -> Head:
    """Read, change and compare-and-swap until it holds. `change` must be idempotent.

    A write whose outcome is unclear is resolved by reading again: where it took effect, `change` finds
    nothing left to do.
    """
    pause = 0.005
    for number in range(_TRIES):
        try:
            head, etag = _read(storage)
            desired = change(head)
            if desired != head or desired.rebuilt:
                storage.put(HEAD_KEY, desired.serialise(), if_match=etag, if_absent=etag is None)
            return desired
        except PreconditionFailed:
            pass
        except StorageUnavailable:
            # The store has retried on its own already; a few more tries only settle an unclear write.
            if number >= 3:
                raise
        time.sleep(pause)
        pause = min(2 * pause, 0.2)
    raise StorageUnavailable(
        f"{HEAD_KEY} of the checkpoint store changed {_TRIES} times while this process tried to change it; "
        "check that no other job uses the same checkpoint.uri."
    )


def _read(storage: CheckpointStorage) -> tuple[Head | None, str | None]:
    try:
        data, etag = storage.get(HEAD_KEY)
    except ObjectNotFound:
        return rebuild(storage), None
    try:
        return Head.parse(data), etag
    except CorruptCheckpoint:
        if (head := rebuild(storage)) is None:
            raise
        return head, etag
