"""Shards as WebDataset writes them."""

from __future__ import annotations

import io
import json
import os
import tarfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import groupby
from operator import itemgetter
from typing import Any, BinaryIO

import numpy as np

from spottrain.data.shards.formats.compression import decompression
from spottrain.data.shards.formats.shard_format import Decode, InvalidShard, Place, Unpack
from spottrain.data.shards.formats.tar_members import members_of


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

    def unpack(self, name: str) -> Unpack | None:
        return decompression(name)

    def places(self, file: BinaryIO) -> Sequence[Place]:
        try:
            members = members_of(file)
        except tarfile.TarError as error:
            raise InvalidShard(f"it can't be read as a tar file without compression: {error}") from error
        named = [(*split_name(each.name), each.begin, each.size) for each in members]
        return [(key, [file[1:] for file in files]) for key, files in groupby(named, key=itemgetter(0))]

    def sample(self, file: int, place: Place) -> Any:
        key, files = place
        found: dict[str, Any] = {"__key__": key}
        for ending, begin, size in files:
            decode = _DECODERS.get(ending.rpartition(".")[2], bytes)
            found[ending] = decode(os.pread(file, size, begin))
        return self.decode(found) if self.decode is not None else found


def _array(content: bytes) -> Any:
    """An array of a `.npy` file. Files of a data set mostly have one of few headers, which take long to parse."""
    if content[: len(_NPY)] != _NPY:
        return np.load(io.BytesIO(content), allow_pickle=False)
    begin = len(_NPY) + 2 + int.from_bytes(content[len(_NPY) : len(_NPY) + 2], "little")
    shape, is_fortran, dtype = _npy_header(content[:begin])
    if dtype.hasobject:
        return np.load(io.BytesIO(content), allow_pickle=False)  # which refuses it
    return np.ndarray(shape, dtype, content, begin, order="F" if is_fortran else "C").copy("K")


@lru_cache
def _npy_header(header: bytes) -> tuple[tuple[int, ...], bool, np.dtype[Any]]:
    return np.lib.format.read_array_header_1_0(io.BytesIO(header[len(_NPY) :]))


# What a file of version 1.0 begins with.
_NPY = b"\x93NUMPY\x01\x00"
_DECODERS: Mapping[str, Callable[[bytes], Any]] = {
    "txt": bytes.decode,
    "cls": int,
    "json": json.loads,
    "npy": _array,
}


def split_name(name: str) -> tuple[str, str]:
    """A member's name without its ending, and the ending: what follows the first dot of its last part."""
    folder, _, base = name.rpartition("/")
    stem, _, ending = base.partition(".")
    return f"{folder}/{stem}" if folder else stem, ending
