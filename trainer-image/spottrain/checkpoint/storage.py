"""The narrow protocol between checkpoints and object stores.

Every store gives the same guarantees, which `tests/contract/test_storage_contract.py` checks for each:
a key holds all of one write or nothing of it, a finished write is seen by every later read and listing,
and of several conditional writes against the same version exactly one wins.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Protocol
from urllib.parse import urlsplit

from spottrain.checkpoint.errors import StorageDenied

Buffer = bytes | bytearray | memoryview
SCHEMES = ("file", "s3", "gs")


class CheckpointStorage(Protocol):
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

    def get(self, key: str) -> tuple[bytes, str]:
        """The object and its etag. Raises ObjectNotFound."""
        ...

    def get_range(self, key: str, offset: int, length: int) -> bytes:
        """Up to `length` bytes from `offset`; fewer where the object ends first. Raises ObjectNotFound."""
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


def open_storage(uri: str, *, endpoint_url: str | None = None) -> CheckpointStorage:
    """Open the store that a checkpoint URI names: file:///folder, s3://bucket/prefix, gs://bucket/prefix.

    `endpoint_url` is the address of an S3-compatible or GCS-compatible server other than the cloud's own.
    Raises StorageDenied with a sentence when the URI can't be used.
    """
    parts = urlsplit(uri)
    if parts.scheme not in SCHEMES:
        raise StorageDenied(
            f"checkpoint.uri {uri!r} has an unknown scheme; use one of "
            + ", ".join(f"{scheme}://" for scheme in SCHEMES)
            + "."
        )
    if parts.scheme == "file":
        return _open_file(uri, parts.netloc, parts.path)
    if not parts.netloc:
        raise StorageDenied(f"checkpoint.uri {uri!r} names no bucket; write {parts.scheme}://BUCKET/PREFIX.")
    if parts.scheme == "s3":
        from spottrain.checkpoint.s3_storage import S3Storage

        return S3Storage(bucket=parts.netloc, prefix=parts.path.strip("/"), endpoint_url=endpoint_url)
    from spottrain.checkpoint.gcs_storage import GcsStorage

    return GcsStorage(bucket=parts.netloc, prefix=parts.path.strip("/"), endpoint_url=endpoint_url)


def _open_file(uri: str, host: str, path: str) -> CheckpointStorage:
    from spottrain.checkpoint.file_storage import FileStorage

    if host not in ("", "localhost") or not path.strip("/"):
        raise StorageDenied(f"checkpoint.uri {uri!r} is not an absolute folder; write file:///FOLDER.")
    return FileStorage(path)
