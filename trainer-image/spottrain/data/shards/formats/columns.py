"""Shards with columns: Parquet and Arrow. Both are unpacked to an Arrow file, in which a row can be read alone."""

from __future__ import annotations

import mmap
from bisect import bisect_right
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate, chain
from typing import TYPE_CHECKING, Any, BinaryIO, overload

import numpy as np
import torch

from spottrain.data.shards.formats.shard_format import (
    Decode,
    Place,
    Unpack,
    check_pyarrow,
    read_as,
)

if TYPE_CHECKING:
    import pyarrow as pa

# Rows that are in memory at once while a Parquet file is unpacked. They may be images.
_ROWS = 256
_ARROW_FILE = b"ARROW1"


@dataclass(frozen=True, slots=True, kw_only=True)
class _Columns:
    decode: Decode | None = None

    def __post_init__(self) -> None:
        check_pyarrow("shards of Parquet or Arrow")

    def places(self, file: BinaryIO) -> Sequence[Place]:
        return _Rows(tuple(accumulate(batch.num_rows for batch in record_batches(file))))

    def sample(self, file: int, place: Place) -> Any:
        number, row = place
        batch = _reader(file).get_batch(number)
        names = batch.schema.names
        value = {name: _value(name, column[row]) for name, column in zip(names, batch.columns, strict=True)}
        return self.decode(value) if self.decode is not None else value


@dataclass(frozen=True, slots=True, kw_only=True)
class Parquet(_Columns):
    """Parquet files, such as those of Hugging Face's data sets. A row is a sample: a dict of its columns.

    A list of numbers becomes a tensor. Images are what the file has: a dict with their bytes.

    Attributes:
        decode: Makes the sample from that dict, as by decoding an image. None: the dict is the sample.
    """

    @property
    def name(self) -> str:
        return "parquet"

    def unpack(self, name: str) -> Unpack | None:
        return _from_parquet


@dataclass(frozen=True, slots=True, kw_only=True)
class Arrow(_Columns):
    """Arrow files and streams, such as `save_to_disk` of Hugging Face's data sets writes. Samples are as in Parquet.

    Attributes:
        decode: Makes the sample from a row. None: the row is the sample.
    """

    @property
    def name(self) -> str:
        return "arrow"

    def unpack(self, name: str) -> Unpack | None:
        return _from_arrow


@dataclass(frozen=True, slots=True)
class _Rows(Sequence[tuple[int, int]]):
    """The record batch of each row, and its place there.

    Attributes:
        ends: Where each record batch ends in the row of all rows.
    """

    ends: tuple[int, ...]

    def __len__(self) -> int:
        return self.ends[-1] if self.ends else 0

    @overload
    def __getitem__(self, index: int) -> tuple[int, int]: ...
    @overload
    def __getitem__(self, index: slice) -> Sequence[tuple[int, int]]: ...
    def __getitem__(self, index: int | slice) -> tuple[int, int] | Sequence[tuple[int, int]]:
        if isinstance(index, slice):
            return [self[each] for each in range(*index.indices(len(self)))]
        number = bisect_right(self.ends, index)
        return number, index - (self.ends[number - 1] if number else 0)


def record_batches(file: BinaryIO) -> Iterator[pa.RecordBatch]:
    """All rows of an unpacked shard, in order."""
    reader = _reader(file.fileno())
    return map(reader.get_batch, range(reader.num_record_batches))


def _reader(file: int) -> pa.ipc.RecordBatchFileReader:
    """Record batches of an unpacked shard. They are mapped into memory, not read."""
    import pyarrow as pa

    return pa.ipc.open_file(pa.py_buffer(mmap.mmap(file, 0, access=mmap.ACCESS_READ)))


def _value(name: str, scalar: pa.Scalar) -> Any:
    import pyarrow as pa

    numbers = getattr(scalar, "values", None)
    if not isinstance(numbers, pa.Array) or not _is_numeric(numbers.type):
        return scalar.as_py()
    if numbers.null_count:
        raise ValueError(f"a list of numbers in column {name!r} has a null")
    return torch.from_numpy(np.array(numbers.to_numpy()))


def _is_numeric(type: pa.DataType) -> bool:
    import pyarrow as pa

    return bool(pa.types.is_integer(type) or pa.types.is_floating(type))


def _from_parquet(packed: BinaryIO, into: BinaryIO) -> None:
    import pyarrow as pa
    import pyarrow.parquet as pq

    with read_as("Parquet", pa.ArrowException):
        parquet = pq.ParquetFile(packed, pre_buffer=False)
        # One by one: batches across row groups may lack rows of columns that have only nulls (pyarrow 26).
        groups = range(parquet.metadata.num_row_groups)
        read = (parquet.iter_batches(batch_size=_ROWS, row_groups=[each], use_threads=False) for each in groups)
        _write(parquet.schema_arrow, chain.from_iterable(read), into)


def _from_arrow(packed: BinaryIO, into: BinaryIO) -> None:
    import pyarrow as pa

    begin = packed.read(len(_ARROW_FILE))
    packed.seek(0)
    with read_as("Arrow", pa.ArrowException):
        if begin != _ARROW_FILE:
            stream = pa.ipc.open_stream(packed)
            _write(stream.schema, stream, into)
            return
        file = pa.ipc.open_file(packed)
        _write(file.schema, map(file.get_batch, range(file.num_record_batches)), into)


def _write(schema: pa.Schema, batches: Iterable[pa.RecordBatch], into: BinaryIO) -> None:
    """Write an Arrow file without compression, and without dictionaries, of which a file has only one."""
    import pyarrow as pa

    plain = pa.schema(
        each.with_type(each.type.value_type) if pa.types.is_dictionary(each.type) else each for each in schema
    )
    with pa.ipc.new_file(into, plain) as writer:
        for batch in batches:
            writer.write_batch(batch.cast(plain))
