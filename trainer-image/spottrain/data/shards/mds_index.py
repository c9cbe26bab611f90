"""The index that MosaicML Streaming keeps beside its shards, `index.json`."""

from __future__ import annotations

import fnmatch
from typing import Literal

import numpy as np
from pydantic import BaseModel, ValidationError

from spottrain.data.shards.index import UNKNOWN, InvalidIndex, ShardIndex, invalid_index

MDS_INDEX_KEY = "index.json"


class _File(BaseModel):
    basename: str
    bytes: int


class _Shard(BaseModel):
    """A shard. `zip_data` is its compressed form, which then is the one that exists."""

    format: Literal["mds"]
    samples: int
    compression: str | None = None
    raw_data: _File
    zip_data: _File | None = None


class _IndexFile(BaseModel):
    version: Literal[2]
    shards: list[_Shard]


def index_of_mds(content: bytes, place: str, pattern: str) -> ShardIndex:
    """Read an index, which has no CRC-32 of its shards. Raises InvalidIndex, which names `place`."""
    try:
        file = _IndexFile.model_validate_json(content)
    except ValidationError as error:
        remedy = "If the store sends something else, mend that; otherwise write the data set again"
        raise invalid_index(f"the index {place} of MosaicML", content, error, remedy) from error
    chosen = [(each.zip_data or each.raw_data, each) for each in file.shards]
    if not chosen:
        raise InvalidIndex(f"the index {place} names no shards")
    if others := [stored.basename for stored, _ in chosen if not fnmatch.fnmatchcase(stored.basename, pattern)]:
        raise InvalidIndex(f"the index {place} names the shard {others[0]}, and {pattern!r} is asked for; correct it")
    for _, shard in chosen:
        if shard.zip_data and (shard.compression or "").partition(":")[0] not in ("gz", "zstd"):
            raise InvalidIndex(f"the shards of {place} are compressed by {shard.compression}; use gz or zstd")
    return ShardIndex(
        format="mds",
        pattern=pattern,
        names=tuple(stored.basename for stored, _ in chosen),
        sizes=np.array([stored.bytes for stored, _ in chosen], np.int64),
        checksums=np.full(len(chosen), UNKNOWN, np.int64),
        samples=np.array([each.samples for _, each in chosen], np.int64),
        unpacked=np.array([each.raw_data.bytes for _, each in chosen], np.int64),
    )
