"""The stores of checkpoints, as shards use them: their errors name the shards, and no setting of checkpoints."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from spottrain.checkpoint.errors import ObjectNotFound, StorageError
from spottrain.checkpoint.stores.storage import Buffer, CheckpointStorage
from spottrain.checkpoint.stores.uri import open_storage

# What stores call the settings of checkpoints, and what they are here.
_NAMES = {
    " in a new job": "",
    "checkpoint.uri": "the URI of the shards",
    "checkpoint.endpointURL": "endpoint_url",
    "the checkpoint folder": "the folder of the shards",
}


class ShardStorage:
    """A folder of a store. Implements ObjectReader, and what making an index and packing need."""

    def __init__(self, folder: str, *, endpoint_url: str | None = None, create_folder: bool = False) -> None:
        """Open it. Raises StorageError."""
        with _of_shards():
            self._storage: CheckpointStorage = open_storage(
                folder, endpoint_url=endpoint_url, create_folder=create_folder
            )
        self.parallel_reads = self._storage.parallel_reads

    def get(self, key: str) -> tuple[bytes, str]:
        with _of_shards():
            return self._storage.get(key)

    def read_into(self, key: str, offset: int, memory: memoryview) -> int:
        with _of_shards():
            return self._storage.read_into(key, offset, memory)

    def list(self, prefix: str) -> Iterator[tuple[str, int]]:
        """Keys and sizes of the objects whose keys start so."""
        with _of_shards():
            yield from self._storage.list(prefix)

    def put(self, key: str, data: Buffer) -> str:
        """Write a small object; its etag."""
        with _of_shards():
            return self._storage.put(key, data)

    def upload(self, key: str, data: Buffer) -> None:
        """Write an object of any size."""
        with _of_shards():
            self._storage.upload(key, data)


@contextmanager
def _of_shards() -> Iterator[None]:
    try:
        yield
    except ObjectNotFound:
        raise
    except StorageError as error:
        said = str(error)
        for name, here in _NAMES.items():
            said = said.replace(name, here)
        raise type(error)(said) from error
