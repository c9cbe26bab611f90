"""Shards of JSON lines."""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, BinaryIO

import numpy as np

from spottrain.data.shards.formats.compression import decompression
from spottrain.data.shards.formats.shard_format import Decode, Place, Unpack


@dataclass(frozen=True, slots=True, kw_only=True)
class JsonLines:
    """A JSON value in each line, which is the sample. Empty lines are left out.

    Attributes:
        decode: Makes the sample from the value. None: the value is the sample.
    """

    decode: Decode | None = None

    @property
    def name(self) -> str:
        return "jsonl"

    def unpack(self, name: str) -> Unpack | None:
        return decompression(name)

    def places(self, file: BinaryIO) -> Sequence[Place]:
        file.seek(0)
        content = np.frombuffer(file.read(), np.uint8)
        ends = np.append(np.flatnonzero(content == ord("\n")), len(content))
        begins = np.concatenate([[0], ends[:-1] + 1])
        return np.stack([begins, ends - begins], axis=1)[ends > begins]  # type: ignore[return-value]

    def sample(self, file: int, place: Place) -> Any:
        begin, size = place
        value = json.loads(os.pread(file, size, begin))
        return self.decode(value) if self.decode is not None else value
