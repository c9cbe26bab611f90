"""Shards of token numbers in a row."""

from __future__ import annotations

import io
import os
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, BinaryIO

import numpy as np
import torch

from spottrain.data.shards.formats.shard_format import InvalidShard, Place, Unpack


@dataclass(frozen=True, slots=True, kw_only=True)
class Tokens:
    """Token numbers one after the other: raw (`.bin`, as nanoGPT writes them) or an array of one dimension (`.npy`).

    A sample is a tensor of `context` + 1 numbers, of type int64. The last one is the first of the sample that
    follows: `sample[:-1]` and `sample[1:]` are inputs and targets. What is left at the end of a shard is not read.

    Attributes:
        context: Tokens that a sample has as inputs.
        dtype: Type of a raw file's numbers.
    """

    context: int
    dtype: str = "uint16"

    def __post_init__(self) -> None:
        if self.context < 1:
            raise ValueError(f"the context of tokens is {self.context}; it has to be at least 1")
        try:
            is_whole = np.dtype(self.dtype).kind in "iu"
        except TypeError:
            is_whole = False
        if not is_whole:
            raise ValueError(f"the type of tokens is {self.dtype!r}; use one such as uint16 or uint32")

    @property
    def name(self) -> str:
        return f"tokens, {self.context} of type {self.dtype} a sample"

    def unpack(self, name: str) -> Unpack | None:
        return None

    def places(self, file: BinaryIO) -> Sequence[Place]:
        begin, dtype = self._header(file)
        num_tokens = (file.seek(0, io.SEEK_END) - begin) // dtype.itemsize
        number = max(0, num_tokens - 1) // self.context
        step = self.context * dtype.itemsize
        return [(begin + index * step, dtype) for index in range(number)] if begin else range(0, number * step, step)

    def sample(self, file: int, place: Place) -> torch.Tensor:
        begin, dtype = place if isinstance(place, tuple) else (place, np.dtype(self.dtype))
        tokens = np.frombuffer(os.pread(file, (self.context + 1) * dtype.itemsize, begin), dtype)
        return torch.from_numpy(tokens.astype(np.int64))

    def _header(self, file: BinaryIO) -> tuple[int, np.dtype[Any]]:
        """Where the numbers begin, and their type."""
        file.seek(0)
        if file.read(6) != b"\x93NUMPY":
            return 0, np.dtype(self.dtype)
        file.seek(0)
        try:
            version = np.lib.format.read_magic(file)
            read = {(1, 0): np.lib.format.read_array_header_1_0, (2, 0): np.lib.format.read_array_header_2_0}
            shape, _, dtype = read[version](file)
        except (KeyError, ValueError) as error:
            raise InvalidShard(f"its header can't be read: {error}") from error
        if len(shape) != 1 or dtype.kind not in "iu":
            raise InvalidShard(
                f"it is an array of shape {shape} and type {dtype}, and tokens are whole numbers in a row"
            )
        return file.tell(), dtype
