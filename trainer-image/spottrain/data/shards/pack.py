"""Packing data into shards of a given size: files into tar files, and rows into Parquet."""

from __future__ import annotations

import mmap
import random
import tarfile
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from itertools import chain, groupby
from pathlib import Path
from typing import TYPE_CHECKING, BinaryIO

from spottrain.data.shards.formats import ShardFormat
from spottrain.data.shards.formats.columns import record_batches
from spottrain.data.shards.formats.tar import split_name
from spottrain.data.shards.make_index import unpacked_shard
from spottrain.data.shards.shard_storage import ShardStorage
from spottrain.data.shards.store import ShardPlace

if TYPE_CHECKING:
    import pyarrow as pa

# Row groups of a shard are as large as they can be, so that columns compress well, and small enough to meet its size.
_GROUPS_PER_SHARD = 16


class Packed:
    """Shards that are written one after the other into an empty folder, as 000000.tar and so on."""

    def __init__(self, folder: str, ending: str, endpoint_url: str | None, on_shard: Callable[[str], None]) -> None:
        """Open the folder.

        Args:
            folder: Its URI.
            ending: Of the names of the shards.
            endpoint_url: Address of an S3- or GCS-compatible server. None: the cloud's own.
            on_shard: Called with the name of each shard that was written.

        Raises:
            ValueError: It has such shards already.
            StorageError: It can't be read.
        """
        self.place = ShardPlace.of(f"{folder.rstrip('/')}/*.{ending}", endpoint_url)
        self._storage = ShardStorage(self.place.folder, endpoint_url=endpoint_url, create_folder=True)
        self._ending = ending
        self._on_shard = on_shard
        self._count = 0
        if (found := next(self.place.shards(self._storage), None)) is not None:
            raise ValueError(f"{self.place.folder} has shards already, such as {found[0]}; name an empty folder")

    @contextmanager
    def next_shard(self) -> Iterator[BinaryIO]:
        """A file for the next shard, which is uploaded at the end."""
        name = f"{self._count:06d}.{self._ending}"
        with tempfile.TemporaryFile() as file:
            yield file
            file.flush()
            # Unmapped by whoever drops the last view. The traceback of an error may be that.
            self._storage.upload(name, memoryview(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)))
        self._count += 1
        self._on_shard(name)


def pack_files(folder: Path, packed: Packed, shard_bytes: int, *, seed: int | None = None) -> None:
    """Pack the files of a folder into tar files. Those that differ in their endings alone are one sample.

    Args:
        folder: With the files, also in folders inside it. Those whose names begin with a dot are left out.
        packed: Takes the shards.
        shard_bytes: Largest size of a shard. A sample that is larger gets one of its own.
        seed: Of the order of the samples. None: by name.

    Raises:
        ValueError: There are no files, or one can't be read.
        StorageError: A shard can't be written.
    """
    try:
        samples = _samples(folder)
        if seed is not None:
            random.Random(seed).shuffle(samples)
        sizes = [sum(_size_in_tar(path, folder) for path in files) for files in samples]
        for part in cut(sizes, shard_bytes - tarfile.RECORDSIZE):
            with packed.next_shard() as file, tarfile.open(fileobj=file, mode="w") as tar:
                for path in chain.from_iterable(samples[part.start : part.stop]):
                    with path.open("rb") as content:
                        tar.addfile(_member(path, folder), content)
    except OSError as error:
        raise ValueError(f"{error.filename or folder} can't be read: {error.strerror}") from error


def pack_rows(source: ShardPlace, format: ShardFormat, packed: Packed, shard_bytes: int) -> None:
    """Pack the rows of Parquet or Arrow files into Parquet files, in their order.

    Args:
        source: The files.
        format: Their format.
        packed: Takes the shards.
        shard_bytes: Size that shards have about, and rarely exceed.

    Raises:
        ValueError: There are no files, or they don't have the format or the same columns.
        StorageError: They can't be read, or a shard can't be written.
    """
    groups = _groups(_batches(source, format), shard_bytes // _GROUPS_PER_SHARD)
    for first in groups:
        with packed.next_shard() as file:
            _fill(file, chain([first], groups), shard_bytes)


def cut(sizes: Sequence[int], most: int) -> Iterator[range]:
    """Cut a row of things into parts of at most a size, or of one thing that is larger."""
    begin, filled = 0, 0
    for place, size in enumerate(sizes):
        if place > begin and filled + size > most:
            yield range(begin, place)
            begin, filled = place, 0
        filled += size
    if begin < len(sizes):
        yield range(begin, len(sizes))


def _samples(folder: Path) -> list[list[Path]]:
    files = [path for path in folder.rglob("*") if path.is_file() and not path.name.startswith(".")]
    if not files:
        raise ValueError(f"{folder} is no folder with files; correct the path")

    def key(path: Path) -> tuple[str, str]:
        return split_name(path.relative_to(folder).as_posix())

    return [list(sample) for _, sample in groupby(sorted(files, key=key), key=lambda path: key(path)[0])]


def _member(path: Path, folder: Path) -> tarfile.TarInfo:
    """A file without owner and times, so that the same files make the same shards."""
    member = tarfile.TarInfo(path.relative_to(folder).as_posix())
    member.size = path.stat().st_size
    return member


def _size_in_tar(path: Path, folder: Path) -> int:
    member = _member(path, folder)
    return len(member.tobuf()) + -(-member.size // tarfile.BLOCKSIZE) * tarfile.BLOCKSIZE


def _batches(source: ShardPlace, format: ShardFormat) -> Iterator[pa.RecordBatch]:
    """The rows of all files, with the columns of the first one."""
    import pyarrow as pa

    storage, schema = source.open_storage(), None
    for name, size in source.shards(storage):
        with unpacked_shard(storage, source, name, size, format) as (file, _):
            for batch in record_batches(file):
                schema = schema or batch.schema
                try:
                    yield batch.cast(schema)
                except (pa.ArrowException, ValueError) as error:
                    raise ValueError(
                        f"{source.folder}/{name} has other columns than the files before it: {error}"
                    ) from error
    if schema is None:
        raise ValueError(f"{source.folder} has no rows in files with names like {source.pattern}; correct the URI")


def _groups(batches: Iterator[pa.RecordBatch], size: int) -> Iterator[pa.Table]:
    """Rows of about a size, before they are compressed."""
    import pyarrow as pa

    waiting: list[pa.RecordBatch] = []
    for batch in batches:
        waiting.append(batch)
        if sum(each.nbytes for each in waiting) >= size:
            yield pa.Table.from_batches(waiting)
            waiting = []
    if waiting:
        yield pa.Table.from_batches(waiting)


def _fill(file: BinaryIO, groups: Iterator[pa.Table], shard_bytes: int) -> None:
    """Write row groups until another one like them would be too much."""
    import pyarrow.parquet as pq

    first = next(groups)
    with pq.ParquetWriter(file, first.schema, compression="zstd") as writer:
        for count, group in enumerate(chain([first], groups), start=1):
            writer.write_table(group, row_group_size=group.num_rows)
            if file.tell() * (count + 1) > shard_bytes * count:
                break
