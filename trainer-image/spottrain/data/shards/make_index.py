"""Making the index of a folder of shards, and checking shards against it."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import BinaryIO, NamedTuple

import numpy as np

from spottrain.checkpoint.errors import ObjectNotFound
from spottrain.data.shards.formats import InvalidShard, ShardFormat
from spottrain.data.shards.index import INDEX_KEY, UNKNOWN, ShardIndex
from spottrain.data.shards.read_shard import read_shard
from spottrain.data.shards.shard_storage import ShardStorage
from spottrain.data.shards.store import ShardDamaged, ShardPlace, again_if_damaged

_PARALLEL_SHARDS = 4


class _Scanned(NamedTuple):
    name: str
    size: int
    checksum: int
    samples: int
    unpacked: int


def make_index(
    place: ShardPlace, format: ShardFormat, *, on_shard: Callable[[str], None] = lambda name: None
) -> ShardIndex:
    """Read every shard once, and write the index beside them.

    Args:
        place: The shards.
        format: Their format.
        on_shard: Called with the name of each shard that was read.

    Raises:
        ValueError: There are no shards, or one does not have the format.
        StorageError: They can't be read, or the index can't be written.
    """
    storage = place.open_storage()
    found = list(place.shards(storage))
    if not found:
        raise ValueError(f"{place.folder} has no objects with names like {place.pattern}; correct the URI")
    scanned = list(_scan(storage, place, found, format, on_shard))
    index = ShardIndex(
        format=format.name,
        pattern=place.pattern,
        names=tuple(each.name for each in scanned),
        sizes=np.array([each.size for each in scanned], np.int64),
        checksums=np.array([each.checksum for each in scanned], np.int64),
        samples=np.array([each.samples for each in scanned], np.int64),
        unpacked=np.array([each.unpacked for each in scanned], np.int64),
    )
    if not index.num_samples:
        raise ValueError(f"the shards {place.folder}/{place.pattern} have no samples")
    storage.put(INDEX_KEY, index.to_json())
    return index


def verify(place: ShardPlace, format: ShardFormat) -> Iterator[str]:
    """Sentences on shards that are not what the index says. Raises as `make_index`, and if there is no index."""
    storage = place.open_storage()
    try:
        content, _ = storage.get(INDEX_KEY)
    except ObjectNotFound as error:
        raise ValueError(
            f"there is no index {place.folder}/{INDEX_KEY}; make it with `spottrain data index`"
        ) from error
    index = ShardIndex.from_json(content, f"{place.folder}/{INDEX_KEY}")
    there = dict(place.shards(storage))
    yield from (f"{name} is in the index, and missing." for name in index.names if name not in there)
    yield from (f"{name} is not in the index." for name in there if name not in set(index.names))
    wanted = zip(index.names, index.sizes.tolist(), index.checksums.tolist(), strict=True)
    for name, size, checksum in wanted:
        if name in there and there[name] != size:
            yield f"{name} has {there[name]} bytes, and the index says {size}."
        elif name in there:
            with tempfile.TemporaryFile() as file:
                try:
                    _read(storage, place, name, size, file, checksum)
                except ShardDamaged:
                    yield f"{name} has another checksum than in the index: its content has changed."


@contextmanager
def unpacked_shard(
    storage: ShardStorage, place: ShardPlace, name: str, size: int, format: ShardFormat
) -> Iterator[tuple[BinaryIO, int]]:
    """A shard as a file in the form in which samples are read, and its checksum.

    Raises:
        ValueError: It does not have the format.
        StorageError: It can't be read.
    """
    with tempfile.TemporaryFile() as file, tempfile.TemporaryFile() as unpacked:
        checksum = _read(storage, place, name, size, file)
        try:
            if (unpack := format.unpack(name)) is None:
                yield file, checksum
                return
            unpack(file, unpacked)
            unpacked.flush()
            yield unpacked, checksum
        except InvalidShard as error:
            raise ValueError(
                f"the shard {place.folder}/{name} has another format than {format.name}: {error}"
            ) from error


def _scan(
    storage: ShardStorage,
    place: ShardPlace,
    found: list[tuple[str, int]],
    format: ShardFormat,
    on_shard: Callable[[str], None],
) -> Iterator[_Scanned]:
    def scan(shard: tuple[str, int]) -> _Scanned:
        name, size = shard
        with unpacked_shard(storage, place, name, size, format) as (file, checksum):
            return _Scanned(name, size, checksum, len(format.places(file)), os.fstat(file.fileno()).st_size)

    with ThreadPoolExecutor(max_workers=_PARALLEL_SHARDS) as pool:
        for each in pool.map(scan, found):
            on_shard(each.name)
            yield each


def _read(
    storage: ShardStorage, place: ShardPlace, name: str, size: int, file: BinaryIO, checksum: int = UNKNOWN
) -> int:
    """Copy a shard into an empty file; its checksum."""
    file.truncate(size)

    def read() -> int:
        return read_shard(
            lambda: storage, name, size, file, place=f"{place.folder}/{place.pattern}", checksum=checksum
        )

    return again_if_damaged(read)
