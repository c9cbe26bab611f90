"""Formats of shards: where the samples of a shard are, and what one is."""

from __future__ import annotations

import io
import json
import tarfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any, BinaryIO, Protocol

import numpy as np
import torch

Place = Any
Decode = Callable[[dict[str, Any]], Any]


class InvalidShard(ValueError):
    """A shard that does not have its format. The message is a clause."""


class ShardFormat(Protocol):
    """How samples lie in a shard."""

    @property
    def name(self) -> str:
        """What the index calls it, with all that decides how many samples a shard has."""
        ...

    def places(self, file: BinaryIO) -> Sequence[Place]:
        """Where each sample of a shard is. Raises InvalidShard."""
        ...

    def sample(self, file: BinaryIO, place: Place) -> Any:
        """Read one sample."""
        ...


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

    def places(self, file: BinaryIO) -> Sequence[Place]:
        begin, dtype = self._header(file)
        num_tokens = (file.seek(0, io.SEEK_END) - begin) // dtype.itemsize
        number = max(0, num_tokens - 1) // self.context
        step = self.context * dtype.itemsize
        return [(begin + index * step, dtype) for index in range(number)] if begin else range(0, number * step, step)

    def sample(self, file: BinaryIO, place: Place) -> torch.Tensor:
        begin, dtype = place if isinstance(place, tuple) else (place, np.dtype(self.dtype))
        file.seek(begin)
        tokens = np.frombuffer(file.read((self.context + 1) * dtype.itemsize), dtype)
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

    def places(self, file: BinaryIO) -> Sequence[Place]:
        file.seek(0)
        content = np.frombuffer(file.read(), np.uint8)
        ends = np.append(np.flatnonzero(content == ord("\n")), len(content))
        begins = np.concatenate([[0], ends[:-1] + 1])
        return np.stack([begins, ends - begins], axis=1)[ends > begins]  # type: ignore[return-value]

    def sample(self, file: BinaryIO, place: Place) -> Any:
        begin, size = place
        file.seek(begin)
        value = json.loads(file.read(size))
        return self.decode(value) if self.decode is not None else value


@dataclass(frozen=True, slots=True, kw_only=True)
class Tar:
    """A tar file as WebDataset writes it: files with one name and different endings in a row are a sample.

    A sample is a dict of the files by ending, with the name as `__key__`. Text (`.txt`), numbers (`.cls`), JSON and
    arrays (`.npy`) are decoded; other files are bytes.

    Attributes:
        decode: Makes the sample from that dict, as by decoding an image. None: the dict is the sample.
    """

    decode: Decode | None = None

    @property
    def name(self) -> str:
        return "tar"

    def places(self, file: BinaryIO) -> Sequence[Place]:
        file.seek(0)
        try:
            with tarfile.open(fileobj=file, mode="r:") as tar:
                members = [(each.name, each.offset_data, each.size) for each in tar if each.isfile()]
        except tarfile.TarError as error:
            raise InvalidShard(f"it can't be read as a tar file without compression: {error}") from error
        samples = groupby(members, key=lambda member: _split(member[0])[0])
        return [(key, [(_split(name)[1], begin, size) for name, begin, size in files]) for key, files in samples]

    def sample(self, file: BinaryIO, place: Place) -> Any:
        key, files = place
        found: dict[str, Any] = {"__key__": key}
        for ending, begin, size in files:
            file.seek(begin)
            found[ending] = _DECODERS.get(ending.rpartition(".")[2], bytes)(file.read(size))
        return self.decode(found) if self.decode is not None else found


_DECODERS: Mapping[str, Callable[[bytes], Any]] = {
    "txt": bytes.decode,
    "cls": int,
    "json": json.loads,
    "npy": lambda content: np.load(io.BytesIO(content), allow_pickle=False),
}
_BY_NAME: Mapping[str, ShardFormat] = {"tar": Tar(), "jsonl": JsonLines()}


def format_of(given: str | ShardFormat) -> ShardFormat:
    """The format that a script names. Raises ValueError for an unknown one."""
    if not isinstance(given, str):
        return given
    if given not in _BY_NAME:
        raise ValueError(
            f"the format of shards is {given!r}; use one of {', '.join(_BY_NAME)}, or Tokens(context=...) of "
            "spottrain.data.shards.formats"
        )
    return _BY_NAME[given]


def _split(name: str) -> tuple[str, str]:
    """A member's name without its ending, and the ending: what follows the first dot of its last part."""
    folder, _, base = name.rpartition("/")
    stem, _, ending = base.partition(".")
    return f"{folder}/{stem}" if folder else stem, ending
