"""Shards that were compressed as a whole, known by the ending of their names."""

from __future__ import annotations

import gzip
import shutil
import zlib
from typing import BinaryIO

from spottrain.data.shards.formats.shard_format import Unpack, check_pyarrow, read_as


def decompression(name: str) -> Unpack | None:
    """What decompresses a shard of this name. None: it is not compressed. Raises ValueError if pyarrow is missing."""
    if name.endswith(".gz"):
        return _from_gzip
    if name.endswith((".zst", ".zstd")):
        check_pyarrow("shards that zstd has compressed")
        return _from_zstd
    return None


def _from_gzip(packed: BinaryIO, into: BinaryIO) -> None:
    with read_as("gzip", EOFError, zlib.error), gzip.open(packed) as content:
        shutil.copyfileobj(content, into)


def _from_zstd(packed: BinaryIO, into: BinaryIO) -> None:
    import pyarrow

    with read_as("zstd", pyarrow.ArrowException), pyarrow.CompressedInputStream(packed, "zstd") as content:
        shutil.copyfileobj(content, into)
