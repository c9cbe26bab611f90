"""A trial of a store before its first use: does it keep the promises of `CheckpointStorage`?

Some servers answer a request that they don't honour with success. A bucket without conditional writes, for example,
would let two generations commit at once, and nobody would notice before a commit is lost.
"""

from __future__ import annotations

import contextlib
import secrets
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from spottrain.checkpoint.errors import (
    ObjectNotFound,
    PreconditionFailed,
    StorageDenied,
    StorageError,
    StorageMissing,
    StoreUnfit,
)
from spottrain.checkpoint.format.attempt import Attempt
from spottrain.checkpoint.stores.storage import CheckpointStorage

# More than a client sends as one part.
_LARGE_BYTES = (8 << 20) + 1
_HELP = "See docs/how-to/bucket.md for what a store needs."


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """What works, and what to know about it nevertheless."""

    works: str
    warning: str | None = None


def try_store(storage: CheckpointStorage) -> Iterator[Finding]:
    """Try each operation that checkpoints need, on objects of its own.

    Args:
        storage: The store. The objects lie where those of a save would. If their deletion fails, a later clean-up
            deletes them.

    Yields:
        What works, after each trial.

    Raises:
        StoreUnfit: The store doesn't do what it must. The message says what.
        StorageError: The store refused or failed a request.
    """
    prefix = Attempt.new(0, 0, f"trial-{secrets.token_hex(8)}").prefix
    keys = [f"{prefix}small", f"{prefix}large"]
    trials: dict[str, Callable[[], str | None]] = {
        "a write that only creates": lambda: _only_creates(storage, keys[0]),
        "a write that only replaces one version": lambda: _only_replaces(storage, keys[0]),
        "a large upload in parts, and reads of a range": lambda: _uploads(storage, keys[1]),
        "a list by prefix": lambda: _lists(storage, prefix, keys),
        "a clean-up of unfinished uploads": lambda: _abandons(storage, prefix),
        "deletion": lambda: _deletes(storage, prefix, keys),
    }
    try:
        for name, trial in trials.items():
            with _explained(name):
                warning = trial()
            yield Finding(works=name, warning=warning)
    except BaseException:
        with contextlib.suppress(StorageError):
            storage.delete(keys)
        raise


@contextlib.contextmanager
def _explained(name: str) -> Iterator[None]:
    """Add to a refusal what was tried. A missing bucket needs no such explanation."""
    try:
        yield
    except (StorageMissing, StoreUnfit):
        raise
    except StorageDenied as error:
        raise StorageDenied(
            f"{error} It was a trial of {name}, without which no checkpoint is safe. {_HELP}"
        ) from error


def _only_creates(storage: CheckpointStorage, key: str) -> None:
    storage.put(key, b"1", if_absent=True)
    with contextlib.suppress(PreconditionFailed):
        storage.put(key, b"2", if_absent=True)
        raise StoreUnfit(_ignored("that should only create it (If-None-Match)"))


def _only_replaces(storage: CheckpointStorage, key: str) -> None:
    _, first = storage.get(key)
    storage.put(key, b"3", if_match=first)
    with contextlib.suppress(PreconditionFailed):
        storage.put(key, b"4", if_match=first)
        raise StoreUnfit(_ignored("that should only replace an older version of it (If-Match)"))
    if (found := storage.get(key)[0]) != b"3":
        raise StoreUnfit(f"The store returned {found!r} for an object that holds b'3'. {_HELP}")


def _ignored(condition: str) -> str:
    return (
        f"The store overwrote an object by a write {condition}. Two generations could commit at once, and one would "
        f"lose its steps. Use a store with conditional writes. {_HELP}"
    )


def _uploads(storage: CheckpointStorage, key: str) -> None:
    data = bytearray(_LARGE_BYTES)
    data[-3:] = b"end"
    storage.upload(key, data)
    memory = bytearray(4)
    length = storage.read_into(key, _LARGE_BYTES - 3, memoryview(memory))
    if (length, bytes(memory[:length])) != (3, b"end"):
        raise StoreUnfit(f"The store did not return the end of an object of {_LARGE_BYTES} bytes. {_HELP}")


def _lists(storage: CheckpointStorage, prefix: str, keys: list[str]) -> None:
    if dict(storage.list(prefix)) != dict(zip(keys, (1, _LARGE_BYTES), strict=True)):
        raise StoreUnfit(f"The store's list lacks objects that were just written, or their sizes. {_HELP}")


def _abandons(storage: CheckpointStorage, prefix: str) -> None:
    storage.abandon_uploads(prefix, lambda key: True)


def _deletes(storage: CheckpointStorage, prefix: str, keys: list[str]) -> str | None:
    kept = storage.keeps_deleted(keys[0])
    storage.delete(keys)
    if list(storage.list(prefix)):
        raise StoreUnfit(f"The store still lists objects after their deletion. {_HELP}")
    with contextlib.suppress(ObjectNotFound):
        storage.get(keys[0])
        raise StoreUnfit(f"The store still returns an object after its deletion. {_HELP}")
    if kept is None:
        return None
    return f"Old commits stay in the store after their deletion: {kept}. Their bytes go on to cost money. {_HELP}"
