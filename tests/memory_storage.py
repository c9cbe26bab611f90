"""A store in this process's memory, for tests.

It is the reference of the storage contract.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator

from spottrain.checkpoint.errors import ObjectNotFound, PreconditionFailed
from spottrain.checkpoint.stores.storage import Buffer, Pieces, whole


class MemoryStorage:
    """Implements CheckpointStorage in a dict."""

    parallel_reads = 2

    def __init__(self) -> None:
        self._objects: dict[str, tuple[bytes, str]] = {}
        self._writes = 0
        self._lock = threading.Lock()

    def put(self, key: str, data: Buffer, *, if_match: str | None = None, if_absent: bool = False) -> str:
        with self._lock:
            current = self._objects.get(key)
            if if_absent and current is not None:
                raise PreconditionFailed(key)
            if if_match is not None and (current is None or current[1] != if_match):
                raise PreconditionFailed(key)
            self._writes += 1
            etag = str(self._writes)
            self._objects[key] = (bytes(data), etag)
            return etag

    def upload(self, key: str, data: Buffer | Pieces) -> None:
        self.put(key, whole(data))

    def get(self, key: str) -> tuple[bytes, str]:
        with self._lock:
            if key not in self._objects:
                raise ObjectNotFound(key)
            return self._objects[key]

    def read_into(self, key: str, offset: int, memory: memoryview) -> int:
        found = self.get(key)[0][offset : offset + len(memory)]
        memory[: len(found)] = found
        return len(found)

    def list(self, prefix: str) -> Iterator[tuple[str, int]]:
        with self._lock:
            found = sorted((key, len(data)) for key, (data, _) in self._objects.items())
        return (item for item in found if item[0].startswith(prefix))

    def keeps_deleted(self, key: str) -> str | None:
        return None

    def delete(self, keys: Iterable[str]) -> None:
        with self._lock:
            for key in keys:
                self._objects.pop(key, None)

    def abandon_uploads(self, prefix: str, is_over: Callable[[str], bool]) -> int:
        return 0
