"""The index of shards: an object beside them with each one's size, checksum and number of samples."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from typing import Literal

import numpy as np
from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from spottrain.data.order import Indices

INDEX_KEY = "spottrain-index.json"
VERSION = 1
_REMEDY = (
    f"This version reads indices of version {VERSION}. If the store sends something else, mend that; otherwise make "
    "it again with `spottrain data index`"
)
UNKNOWN = -1
"""Stands for the checksum of a shard whose size alone is known."""


class InvalidIndex(ValueError):
    """An index that can't be used. The message is a sentence."""


class DamagedIndex(InvalidIndex):
    """Something else than an index, such as a part of one. The message is a sentence."""


def invalid_index(what: str, content: bytes, error: ValidationError, remedy: str) -> InvalidIndex:
    """What is wrong with an index; `what` and `remedy` are the beginning and the end of the sentence."""
    first = error.errors(include_url=False)[0]
    if first["type"] == "json_invalid":
        seen = f"it has {len(content)} bytes, and begins with {content[:40]!r}"
        return DamagedIndex(f"{what} can't be read: {first['msg']}; {seen}. {remedy}")
    where = ".".join(map(str, first["loc"])) or "the whole"
    return InvalidIndex(f"{what} can't be read: {where}: {first['msg']}. {remedy}")


class _IndexFile(BaseModel):
    """The index as JSON. Its lists have one entry for each shard."""

    model_config = ConfigDict(extra="forbid")

    version: Literal[1] = 1
    format: str
    pattern: str
    names: list[str] = Field(min_length=1)
    sizes: list[int]
    checksums: list[int]
    samples: list[int]
    unpacked: list[int]

    @model_validator(mode="after")
    def _is_even(self) -> _IndexFile:
        if len({len(each) for each in (self.names, self.sizes, self.checksums, self.samples, self.unpacked)}) > 1:
            raise ValueError("its lists have different lengths")
        return self


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class ShardIndex:
    """Which shards there are, in order of name.

    Attributes:
        format: Format of the shards: `ShardFormat.name`.
        pattern: Which objects are shards, such as `*.tar`.
        names: Their keys.
        sizes: Their bytes; shape `(shards,)`.
        checksums: CRC-32 of their bytes, or `UNKNOWN`.
        samples: How many samples each has.
        unpacked: Their bytes in a cache, where they have the form in which samples are read.
    """

    format: str
    pattern: str
    names: tuple[str, ...]
    sizes: Indices
    checksums: Indices
    samples: Indices
    unpacked: Indices

    @property
    def num_samples(self) -> int:
        return int(self.samples.sum())

    @property
    def fingerprint(self) -> str:
        """Changes with the content of a shard."""
        content = "\n".join(self.names).encode() + self.sizes.tobytes() + self.checksums.tobytes()
        return hashlib.sha256(content + self.samples.tobytes() + self.format.encode()).hexdigest()[:12]

    def to_json(self) -> bytes:
        lists = {name: getattr(self, name).tolist() for name in ("sizes", "checksums", "samples", "unpacked")}
        file = _IndexFile(format=self.format, pattern=self.pattern, names=list(self.names), **lists)
        return file.model_dump_json().encode()

    @classmethod
    def from_json(cls, content: bytes, place: str) -> ShardIndex:
        """Read an index. Raises InvalidIndex, which names `place`."""
        try:
            file = _IndexFile.model_validate_json(content)
        except ValidationError as error:
            raise invalid_index(f"the index {place}", content, error, _REMEDY) from error
        return cls(
            format=file.format,
            pattern=file.pattern,
            names=tuple(file.names),
            sizes=np.array(file.sizes, np.int64),
            checksums=np.array(file.checksums, np.int64),
            samples=np.array(file.samples, np.int64),
            unpacked=np.array(file.unpacked, np.int64),
        )
