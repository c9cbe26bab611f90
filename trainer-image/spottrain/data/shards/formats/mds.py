"""Shards of MosaicML Streaming (MDS).

A shard has the number of its samples, where each begins and the last one ends, its columns as JSON, and the samples.
A sample has the sizes of those columns that have no fixed one, and then the columns. Numbers before the columns are
of type uint32. See https://docs.mosaicml.com/projects/streaming/en/stable/preparing_datasets/dataset_format.html, and
`streaming/base/format/mds` of mosaicml-streaming 0.13.0.
"""

from __future__ import annotations

import io
import json
import os
import struct
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from decimal import Decimal
from functools import partial
from itertools import pairwise
from typing import Any, BinaryIO, NamedTuple

import numpy as np
from pydantic import BaseModel, ValidationError

from spottrain.data.order import Indices
from spottrain.data.shards.formats.compression import decompression
from spottrain.data.shards.formats.shard_format import Decode, InvalidShard, Place, Unpack

_WORD = 4
_Decoder = Callable[[bytes], Any]


class _Header(BaseModel):
    """Columns of a shard. A size is None if it differs between samples."""

    column_names: list[str]
    column_encodings: list[str]
    column_sizes: list[int | None]


class _Column(NamedTuple):
    name: str
    size: int | None
    decode: _Decoder


@dataclass(frozen=True, slots=True, kw_only=True)
class Mds:
    """A shard that MosaicML Streaming has written. A sample is a dict of its columns.

    Images are what the shard has, as bytes. Pickles are not read: they run code of whoever wrote them.

    Attributes:
        decode: Makes the sample from that dict, as by decoding an image. None: the dict is the sample.
    """

    decode: Decode | None = None

    @property
    def name(self) -> str:
        return "mds"

    def unpack(self, name: str) -> Unpack | None:
        return decompression(name)

    def places(self, file: BinaryIO) -> Sequence[Place]:
        size = file.seek(0, io.SEEK_END)
        file.seek(0)
        number = int.from_bytes(file.read(_WORD), "little")
        table = file.read((number + 1) * _WORD)
        ends = np.frombuffer(table[: len(table) // _WORD * _WORD], "<u4")
        if len(ends) != number + 1 or ends[-1] != size or np.any(np.diff(ends.astype(np.int64)) < 0):
            raise InvalidShard("its table of samples is not that of an MDS shard")
        columns = _columns(file.read(int(ends[0]) - file.tell()))
        return [(begin, end - begin, columns) for begin, end in pairwise(ends.tolist())]

    def sample(self, file: int, place: Place) -> Any:
        begin, size, columns = place
        value = dict(_values(os.pread(file, size, begin), columns))
        return self.decode(value) if self.decode is not None else value


def _columns(content: bytes) -> tuple[_Column, ...]:
    try:
        header = _Header.model_validate_json(content)
    except ValidationError as error:
        raise InvalidShard(f"its columns can't be read: {error.errors(include_url=False)[0]['msg']}") from error
    decoders = map(_decoder, header.column_names, header.column_encodings)
    return tuple(map(_Column, header.column_names, header.column_sizes, decoders))


def _values(content: bytes, columns: Sequence[_Column]) -> Iterator[tuple[str, Any]]:
    open_sizes = sum(not column.size for column in columns)
    sizes = iter(struct.unpack_from(f"<{open_sizes}I", content))
    begin = open_sizes * _WORD
    for column in columns:
        end = begin + (column.size or next(sizes))
        yield column.name, column.decode(content[begin:end])
        begin = end


def _decoder(name: str, encoding: str) -> _Decoder:
    kind, *details = encoding.split(":")
    if kind == "ndarray":
        dtype, shape = [*details, None, None][:2]
        return partial(_array, dtype, tuple(map(int, shape.split(","))) if shape else None)
    if encoding in _NUMBERS:
        return partial(_number, encoding)
    if encoding not in _DECODERS:
        raise InvalidShard(
            f"its column {name!r} has the encoding {encoding!r}, which spottrain does not read; write the data set "
            f"again with one of ndarray, {', '.join((*_DECODERS, *_NUMBERS))}"
        )
    return _DECODERS[encoding]


def _number(dtype: str, content: bytes) -> Any:
    return np.frombuffer(content, dtype)[0]


def _array(dtype: str | None, shape: Sequence[int] | Indices | None, content: bytes) -> Any:
    """An array, after its type and shape if the columns don't fix them.

    The type is a number. The shape has its length in the upper six bits of a byte, and the type of its numbers in the
    others.
    """
    begin = 0
    if dtype is None:
        dtype, begin = _TYPES[content[0]], 1
    if shape is None:
        length, type_of_shape = content[begin] >> 2, np.dtype(f"u{1 << (content[begin] & 3)}")
        shape = np.frombuffer(content, type_of_shape, length, begin + 1).astype(np.int64)
        begin += 1 + length * type_of_shape.itemsize
    return np.frombuffer(content, dtype, offset=begin).reshape(shape).copy()


_DECODERS: Mapping[str, _Decoder] = {
    "bytes": bytes,
    "str": bytes.decode,
    "int": lambda content: int.from_bytes(content, "little", signed=True),
    "str_int": int,
    "str_float": float,
    "str_decimal": lambda content: Decimal(content.decode()),
    "json": json.loads,
    "jpeg": bytes,
    "png": bytes,
}
_NUMBERS = ("uint8", "uint16", "uint32", "uint64", "int8", "int16", "int32", "int64", "float16", "float32", "float64")
_TYPES: Mapping[int, str] = {
    **{8: "uint8", 16: "uint16", 32: "uint32", 64: "uint64"},
    **{9: "int8", 17: "int16", 33: "int32", 65: "int64"},
    **{18: "float16", 34: "float32", 66: "float64"},
}
