"""The narrow protocol between checkpoints and object stores.

Every store gives the same guarantees, which `tests/contract/test_storage_contract.py` checks for each:
a key holds all of one write or nothing of it, a finished write is seen by every later read and listing,
and of several conditional writes against the same version exactly one wins.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Protocol

# So long may nothing move on a connection to a store before the request is sent anew, on another one: less than the
# shortest notice of a cloud, or a connection that hangs would cost the last commit.
ANSWER_SECONDS = 15.0

Buffer = bytes | bytearray | memoryview


class ObjectReader(Protocol):
    """What loading needs of a store: a checkpoint may lie elsewhere, too (replicas.py)."""

    parallel_reads: int
    """How many reads at once serve one rank best."""

    def get(self, key: str) -> tuple[bytes, str]:
        """The object and its etag. Raises ObjectNotFound."""
        ...

    def read_into(self, key: str, offset: int, memory: memoryview) -> int:
        """Fill `memory` with the object's bytes from `offset`, and return how many there were: fewer than asked
        for where the object ends first. Raises ObjectNotFound."""
        ...


class CheckpointStorage(ObjectReader, Protocol):
    """A flat key-value store; keys are relative to the URI it was opened with, parted by '/'.

    All methods may be called from several threads at once. They raise StorageUnavailable when trying
    again later may help, StorageDenied when it can't.
    """

    def put(self, key: str, data: Buffer, *, if_match: str | None = None, if_absent: bool = False) -> str:
        """Write a small object atomically and return its etag.

        With `if_match` only if the object's etag is still that; with `if_absent` only if there is none.
        Raises PreconditionFailed otherwise. After StorageUnavailable the write may have taken effect.
        """
        ...

    def upload(self, key: str, data: Buffer) -> None:
        """Write a large object, unconditionally, in parallel parts where the store has them."""
        ...

    def list(self, prefix: str) -> Iterator[tuple[str, int]]:
        """(key, size in bytes) of every object whose key starts with `prefix`, in order of key."""
        ...

    def delete(self, keys: Iterable[str]) -> None:
        """Delete these objects; keys that don't exist are fine."""
        ...

    def abandon_uploads(self, prefix: str, is_over: Callable[[str], bool]) -> int:
        """Drop what unfinished uploads of keys under `prefix` have left, where `is_over(key)`; how many."""
        ...
