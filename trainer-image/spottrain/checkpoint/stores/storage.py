"""The narrow protocol between checkpoints and object stores.

Every store gives the same guarantees, and `tests/contract/test_storage_contract.py` checks them for each. A key holds
all of one write or nothing of it. Every later read and listing sees a finished write. Of several conditional writes
against the same version, exactly one wins.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Protocol

# How long a connection to a store may stall before the request is sent again on a new one. Less than the shortest
# notice of a cloud: otherwise, a connection that hangs would cost the last commit.
ANSWER_SECONDS = 15.0
# Pauses, in seconds, before a store that does not answer is asked again, where nothing can go on without it. They are
# five minutes in all.
PAUSES = (1, 2, 4, 8, 15, 30, 60, 60, 60, 60)

Buffer = bytes | bytearray | memoryview


class Pieces(Protocol):
    """Bytes that are never in memory as a whole.

    An iteration makes one piece after the other. Each is valid until the next is made. All but the last have
    `piece_bytes`.
    """

    piece_bytes: int

    def __len__(self) -> int:
        """Bytes of all pieces together."""
        ...

    def __iter__(self) -> Iterator[memoryview]: ...


def pieces_of(data: Buffer | Pieces) -> Iterable[memoryview]:
    """The pieces of data; a buffer is its only piece."""
    return [memoryview(data)] if isinstance(data, Buffer) else data


def whole(data: Buffer | Pieces) -> memoryview:
    """Data that is small enough to have it in memory as a whole."""
    return memoryview(data if isinstance(data, Buffer) else b"".join(bytes(piece) for piece in data))


class ObjectReader(Protocol):
    """What loading needs of a store. A checkpoint may lie elsewhere, too (replicas.py)."""

    parallel_reads: int
    """How many parallel reads serve one rank best."""

    def get(self, key: str) -> tuple[bytes, str]:
        """The object and its etag. Raises ObjectNotFound."""
        ...

    def read_into(self, key: str, offset: int, memory: memoryview) -> int:
        """Fill `memory` with the object's bytes from `offset`, and return their number.

        It is smaller than `len(memory)` if the object ends first. Raises ObjectNotFound.
        """
        ...


class CheckpointStorage(ObjectReader, Protocol):
    """A flat key-value store. Keys are relative to the URI that it was opened with; '/' separates their parts.

    All methods may be called from several threads at once. They raise StorageUnavailable if a later try may succeed,
    and StorageDenied if it can't.
    """

    def put(self, key: str, data: Buffer, *, if_match: str | None = None, if_absent: bool = False) -> str:
        """Write a small object atomically.

        Args:
            key: The object.
            data: Its content.
            if_match: Write only if the object's etag is still this one.
            if_absent: Write only if the object doesn't exist.

        Returns:
            The object's new etag.

        Raises:
            PreconditionFailed: The condition doesn't hold.
            StorageUnavailable: Maybe nothing was written, maybe all of it.
        """
        ...

    def upload(self, key: str, data: Buffer | Pieces) -> None:
        """Write a large object, unconditionally, in parallel parts if the store has them.

        The object appears once all of it is written. Of pieces, no more than one is in memory at a time.
        """
        ...

    def list(self, prefix: str) -> Iterator[tuple[str, int]]:
        """Every object whose key starts with `prefix`, in order of key. Each is (key, size in bytes)."""
        ...

    def delete(self, keys: Iterable[str]) -> None:
        """Delete these objects. It is fine if a key doesn't exist."""
        ...

    def keeps_deleted(self, key: str) -> str | None:
        """Why deleting this object would not free its bytes, as a clause; None if nothing is known to keep them."""
        ...

    def abandon_uploads(self, prefix: str, is_over: Callable[[str], bool]) -> int:
        """Drop the rest of unfinished uploads of keys under `prefix` if `is_over(key)`.

        Returns how many these were.
        """
        ...
