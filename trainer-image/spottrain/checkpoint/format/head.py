"""HEAD: the one small object that says which checkpoints exist.

It also says who may write the next one. Every change is a compare-and-swap of the whole object. An attempt that HEAD
doesn't name is not a checkpoint, however complete it looks. What HEAD names is complete, because it was verified
first. Only if HEAD itself is missing or damaged do complete attempts count: HEAD is rebuilt from them.
"""

from __future__ import annotations

import time
from collections.abc import Callable

from spottrain.checkpoint.errors import (
    CorruptCheckpoint,
    Fenced,
    FrozenWeightsGone,
    ObjectNotFound,
    PreconditionFailed,
    StepBehind,
    StorageUnavailable,
)
from spottrain.checkpoint.format.attempt import start_of
from spottrain.checkpoint.format.commits import Commit, Head
from spottrain.checkpoint.format.rebuild import rebuild
from spottrain.checkpoint.stores.storage import CheckpointStorage

HEAD_KEY = "HEAD"
_TRIES = 50


def read_head(storage: CheckpointStorage) -> Head | None:
    """What HEAD says now, or None if nothing was ever fenced or committed.

    Raises CorruptCheckpoint or StorageError.
    """
    return _read(storage)[0]


def fence(storage: CheckpointStorage, generation: int, *, before_first: Callable[[], None] = lambda: None) -> Head:
    """Fence older generations, so that they can't commit any more.

    Args:
        storage: The store.
        generation: The generation that takes over.
        before_first: Called before the first write to a store that holds no HEAD and no commit. It may raise.

    Returns:
        What HEAD says from now on.

    Raises:
        Fenced: A newer generation did so first.
    """

    def raise_fence(head: Head | None) -> Head:
        if head is None:
            before_first()
            return Head(fence=generation)
        if head.fence > generation:
            raise Fenced(
                f"Generation {generation} may not commit: generation {head.fence}, of an earlier job or of this one, "
                "has used this folder already. The next generation gets a higher number, and continues.",
                head.fence,
            )
        return head.model_copy(update={"fence": generation})

    return _update(storage, raise_fence)


def commit(storage: CheckpointStorage, new: Commit, *, resumed_from_step: int | None = None) -> Head:
    """Make `new` the newest commit.

    Steps only go up, with one exception: a newer generation may have resumed from an older kept commit, because those
    after it were damaged. It drops these. A commit that HEAD names already stays as it is, so that it is safe to ask
    again after an unclear outcome.

    Args:
        storage: The store.
        new: The commit. A commit that HEAD names must hold the frozen weights that it refers to, because clean-up
            deletes others.
        resumed_from_step: The step that this generation resumed from. None once it has committed.

    Returns:
        What HEAD says from now on.

    Raises:
        Fenced: A newer generation has taken over, or another start of this one.
        StepBehind: A commit of this step, or of a later one, exists.
        FrozenWeightsGone: No commit holds the frozen weights.
    """

    def add(head: Head | None) -> Head:
        if head is None:
            _refuse_unheld(Head(fence=new.generation), new)
            return Head(fence=new.generation, commits=(new,))
        is_known = any(kept.attempt == new.attempt for kept in head.commits)
        if head.rebuilt or not is_known:  # a rebuilt HEAD may name an attempt that was fenced before its commit
            _refuse_fenced(head, new.generation)
        if is_known:
            return head
        _refuse_unheld(head, new)
        kept = _kept_before(head, new, resumed_from_step)
        return head.model_copy(update={"fence": new.generation, "commits": (new, *kept)})

    return _update(storage, add)


def prune(storage: CheckpointStorage, generation: int, keep: Callable[[tuple[Commit, ...]], set[str]]) -> Head:
    """Remove commits from HEAD, except the newest and those to keep.

    Those to keep are the ones whose attempts `keep` returns.

    Raises:
        Fenced: A newer generation has taken over.
    """

    def drop(head: Head | None) -> Head:
        if head is None:
            return Head(fence=generation)
        _refuse_fenced(head, generation)
        kept = keep(head.commits)
        left = tuple(c for c in head.commits if c is head.newest or c.attempt in kept)
        return head.model_copy(update={"commits": left})

    return _update(storage, drop)


def _kept_before(head: Head, new: Commit, resumed_from_step: int | None) -> tuple[Commit, ...]:
    """The commits that stay below `new`.

    A damaged one that was passed over goes at once, whatever the step of `new`: retention would count it in place of
    a whole one.
    """
    commits, newest = head.commits, head.newest
    if newest is None:
        return commits
    base = resumed_from_step
    if newest.step != base:
        _refuse_other_start(newest, new)
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


def _refuse_other_start(newest: Commit, new: Commit) -> None:
    """Refuse a commit beside those of another start of the same generation.

    After a restore of etcd, an operator may give a number again whose generation still runs somewhere. Only one of
    the two may go on.
    """
    if newest.generation == new.generation and start_of(newest.attempt) != start_of(new.attempt):
        raise Fenced(
            f"Generation {new.generation} may not commit any more: it was started twice, as after a restore of etcd, "
            f"and the other start has committed step {newest.step}.",
            new.generation,
        )


def _refuse_unheld(head: Head, new: Commit) -> None:
    if not head.held().issuperset(new.needs):
        raise FrozenWeightsGone(
            f"Step {new.step} was not committed: no commit holds the frozen weights that it refers to any more. The "
            "next save writes them again."
        )


def _update(storage: CheckpointStorage, change: Callable[[Head | None], Head]) -> Head:
    """Read, change and compare-and-swap until the swap succeeds. `change` must be idempotent.

    If the outcome of a write is unclear, the next read settles it: if the write took effect, `change` finds nothing
    left to do.
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
            # The store has retried already. A few more tries only settle an unclear write.
            if number >= 3:
                raise
        time.sleep(pause)
        pause = min(2 * pause, 0.2)
    raise StorageUnavailable(
        f"{HEAD_KEY} of the checkpoint store changed {_TRIES} times while this process tried to change it. "
        "Check that no other job uses the same checkpoint.uri."
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
