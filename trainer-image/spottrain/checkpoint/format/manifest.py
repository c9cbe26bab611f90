"""What an attempt consists of: a receipt of every rank, and the manifest.

Rank 0 builds the manifest from the receipts. Data files hold the raw bytes of tensors, one after the other. Each
block of a file has a checksum, so that a reader that needs a part of the file (at a different world size) can verify
just that part.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Iterable, Mapping, Sequence
from datetime import UTC, datetime
from typing import Any, Self

import torch
from pydantic import BaseModel, ConfigDict, NonNegativeInt, PositiveInt, ValidationError, model_validator
from zlib_ng import zlib_ng

from spottrain.checkpoint.errors import CheckpointMismatch, CorruptCheckpoint, ObjectNotFound
from spottrain.checkpoint.format.checksummed_json import dump_checksummed, verify_checksummed
from spottrain.checkpoint.format.commits import FORMAT_VERSION, Commit, Time
from spottrain.checkpoint.stores.storage import Buffer, CheckpointStorage

BLOCK_BYTES = 4 << 20
ALIGNMENT_BYTES = 64
FROZEN_SUFFIX = ".frozen.data"

DTYPES: dict[str, torch.dtype] = {
    str(dtype).removeprefix("torch."): dtype
    for dtype in (
        *(torch.float64, torch.float32, torch.float16, torch.bfloat16),
        *(torch.float8_e4m3fn, torch.float8_e5m2, torch.float8_e4m3fnuz, torch.float8_e5m2fnuz),
        *(torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8, torch.bool),
        *(torch.uint16, torch.uint32, torch.uint64, torch.complex64, torch.complex128),
    )
}


class _Model(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", ser_json_inf_nan="constants")


class DataFile(_Model):
    """Size of one rank's data, and the checksums of its blocks."""

    size: NonNegativeInt
    block_bytes: PositiveInt = BLOCK_BYTES
    crc32: tuple[int, ...]

    @model_validator(mode="after")
    def _a_checksum_for_every_block(self) -> Self:
        if len(self.crc32) != -(-self.size // self.block_bytes):
            raise ValueError("the number of checksums does not fit the size")
        return self


class FrozenFile(_Model):
    """A rank's file of frozen weights. It belongs to the attempt that wrote it; commits of others refer to it."""

    attempt: str
    rank: NonNegativeInt
    file: DataFile

    @property
    def key(self) -> str:
        return frozen_key(self.attempt, self.rank)


class Chunk(_Model):
    """A box of a tensor, and its place in a file.

    Its place in the tensor is in elements, and its place in the file is in bytes.

    Attributes:
        rank: The rank whose file it is. In a manifest: the number of the file, those of frozen weights last.
    """

    rank: NonNegativeInt
    begin: NonNegativeInt
    end: NonNegativeInt
    offsets: tuple[NonNegativeInt, ...]
    lengths: tuple[NonNegativeInt, ...]


class Entry(_Model):
    """A chunk that a rank wrote, with name, dtype and shape of its tensor."""

    fqn: str
    dtype: str
    shape: tuple[NonNegativeInt, ...]
    chunk: Chunk


class Receipt(_Model):
    """A rank's statement that its part is stored, or why it isn't.

    Attributes:
        error: Why its part is not stored, from `error_to_json`.
        frozen: The file of frozen weights, if this save writes some and this rank has a part in that.
    """

    rank: NonNegativeInt
    world_size: int
    error: tuple[Any, ...] | None = None
    file: DataFile = DataFile(size=0, crc32=())
    entries: tuple[Entry, ...] = ()
    frozen: DataFile | None = None
    frozen_entries: tuple[Entry, ...] = ()
    rank_state: Any = None

    @classmethod
    def parse(cls, data: bytes) -> Self:
        """Read stored bytes. Raises ValueError if they are not what was written."""
        return cls.model_validate_json(verify_checksummed(data))


class Tensor(_Model):
    """Dtype, shape (in elements) and chunks of a tensor. The chunks cover it exactly once."""

    dtype: str
    shape: tuple[NonNegativeInt, ...]
    chunks: tuple[Chunk, ...]

    @model_validator(mode="after")
    def _covered_once(self) -> Self:
        if self.dtype not in DTYPES:
            raise ValueError(f"unknown dtype {self.dtype}")
        for chunk in self.chunks:
            self._check_box(chunk)
        # The boxes come from DCP's plan, which refuses overlaps. So the sum of the volumes decides.
        if sum(math.prod(chunk.lengths) for chunk in self.chunks) != math.prod(self.shape):
            raise ValueError("the chunks do not cover the tensor exactly once")
        return self

    def _check_box(self, chunk: Chunk) -> None:
        if not len(chunk.offsets) == len(chunk.lengths) == len(self.shape):
            raise ValueError("a chunk has a different number of dimensions than its tensor")
        if any(o + n > size for o, n, size in zip(chunk.offsets, chunk.lengths, self.shape, strict=True)):
            raise ValueError("a chunk reaches beyond its tensor")
        if chunk.end - chunk.begin != math.prod(chunk.lengths) * DTYPES[self.dtype].itemsize:
            raise ValueError("a chunk's bytes do not fit its shape")


class Manifest(_Model):
    """A whole checkpoint: every tensor's place, and all state that is not a tensor.

    Attributes:
        shared: Files of frozen weights, of this attempt or of older ones, which commits share.
        tree: The state with its tensors replaced by their names, as `codec.split` returns it.
        saved_at: When it was made, in UTC and ISO 8601; for people.
    """

    format_version: int = FORMAT_VERSION
    generation: int
    step: int
    world_size: int
    files: tuple[DataFile, ...]
    shared: tuple[FrozenFile, ...] = ()
    tensors: dict[str, Tensor]
    tree: Any
    rank_states: tuple[Any, ...]
    extra: Any
    saved_at: Time

    @model_validator(mode="after")
    def _chunks_lie_in_files(self) -> Self:
        if len(self.files) != self.world_size or len(self.rank_states) != self.world_size:
            raise ValueError("the numbers of files and states are not the number of ranks")
        for tensor in self.tensors.values():
            for chunk in tensor.chunks:
                if chunk.rank >= self.num_files or chunk.end > self.file(chunk.rank).size:
                    raise ValueError("a chunk reaches beyond its file")
        return self

    @property
    def num_files(self) -> int:
        """The number of files: those of the ranks, then those of frozen weights."""
        return len(self.files) + len(self.shared)

    def file(self, number: int) -> DataFile:
        first = len(self.files)
        return self.files[number] if number < first else self.shared[number - first].file

    def key(self, prefix: str, number: int) -> str:
        """Key of a file, by its number, for the checkpoint at `prefix`."""
        first = len(self.files)
        return data_key(prefix, number) if number < first else self.shared[number - first].key

    def needs(self, prefix: str) -> tuple[str, ...]:
        """Other attempts whose files the checkpoint at `prefix` refers to."""
        return tuple(sorted({frozen.attempt for frozen in self.shared} - {prefix}))

    def size(self, prefix: str) -> tuple[int, int]:
        """Bytes of tensors and padding at the checkpoint's own `prefix`, and elsewhere."""
        elsewhere = sum(frozen.file.size for frozen in self.shared if frozen.attempt != prefix)
        return sum(self.file(number).size for number in range(self.num_files)) - elsewhere, elsewhere

    @classmethod
    def parse(cls, data: bytes, key: str) -> Self:
        """Read stored bytes. `key` is for messages.

        Raises:
            CheckpointMismatch: The format has an unknown version.
            CorruptCheckpoint: The bytes are not what was written.
        """
        try:
            text = verify_checksummed(data)
            content = json.loads(text)
            version = content.get("format_version")
            if version != FORMAT_VERSION:
                raise CheckpointMismatch(
                    f"{key} is of format version {version}; this spottrain reads {FORMAT_VERSION}."
                )
            return cls.model_validate(content)
        except ValidationError as error:
            raise CorruptCheckpoint(f"{key} is damaged: {_first(error)}.") from error
        except (ValueError, AttributeError) as error:
            raise CorruptCheckpoint(f"{key} is damaged: {error}.") from error


def data_key(prefix: str, rank: int) -> str:
    return f"{prefix}rank-{rank:05d}.data"


def frozen_key(prefix: str, rank: int) -> str:
    return f"{prefix}rank-{rank:05d}{FROZEN_SUFFIX}"


def receipt_key(prefix: str, rank: int) -> str:
    return f"{prefix}rank-{rank:05d}.receipt.json"


def block_checksums(data: Buffer, block_bytes: int = BLOCK_BYTES) -> tuple[int, ...]:
    """CRC-32 of each block. zlib-ng releases the interpreter lock, as zlib does, and is eight times as fast."""
    view = memoryview(data)
    return tuple(zlib_ng.crc32(view[begin : begin + block_bytes]) for begin in range(0, len(view), block_bytes))


def index_tensors(entries: Iterable[Entry]) -> dict[str, Tensor]:
    """Gather the chunks of all ranks by tensor. Raises CorruptCheckpoint if they don't fit together."""
    chunks: dict[str, list[Chunk]] = {}
    kinds: dict[str, tuple[str, tuple[int, ...]]] = {}
    for entry in entries:
        kind = (entry.dtype, entry.shape)
        if kinds.setdefault(entry.fqn, kind) != kind:
            raise CorruptCheckpoint(f"The ranks disagree about the type or shape of {entry.fqn!r}.")
        chunks.setdefault(entry.fqn, []).append(entry.chunk)
    try:
        return {
            fqn: Tensor(dtype=kinds[fqn][0], shape=kinds[fqn][1], chunks=tuple(of_tensor))
            for fqn, of_tensor in chunks.items()
        }
    except ValidationError as error:
        raise CorruptCheckpoint(f"The ranks' parts don't fit together: {_first(error)}.") from error


def build_manifest(
    receipts: Sequence[Receipt],
    *,
    generation: int,
    step: int,
    tree: Any,
    extra: Any,
    saved_at: str | None = None,
    frozen_files: Sequence[FrozenFile] = (),
    frozen_tensors: Mapping[str, Tensor] | None = None,
) -> Manifest:
    """The manifest of an attempt whose receipts are complete.

    The receipts are in order of rank. If there are files of frozen weights, the manifest has the tensors in them,
    too. `saved_at` None: now.
    """
    tensors = index_tensors(entry for receipt in receipts for entry in receipt.entries)
    return Manifest(
        generation=generation,
        step=step,
        world_size=len(receipts),
        files=tuple(receipt.file for receipt in receipts),
        shared=tuple(frozen_files),
        tensors=tensors | dict(frozen_tensors or {}),
        tree=tree,
        rank_states=tuple(receipt.rank_state for receipt in receipts),
        extra=extra,
        saved_at=saved_at or datetime.now(UTC).isoformat(timespec="milliseconds"),
    )


def serialise(model: Manifest | Receipt) -> tuple[bytes, str]:
    """The bytes of a manifest or receipt, and their SHA-256."""
    data = dump_checksummed(model)
    return data, hashlib.sha256(data).hexdigest()


def read_manifest(storage: CheckpointStorage, commit: Commit) -> Manifest:
    """The manifest of a commit. Raises CorruptCheckpoint or CheckpointMismatch."""
    try:
        data, _ = storage.get(commit.manifest)
    except ObjectNotFound as error:
        raise CorruptCheckpoint(f"{commit.manifest} of the committed checkpoint is missing.") from error
    return parse_manifest(data, commit)


def parse_manifest(data: bytes, commit: Commit) -> Manifest:
    """The manifest that `commit` names. Raises CorruptCheckpoint, or CheckpointMismatch for an unknown version."""
    if hashlib.sha256(data).hexdigest() != commit.manifest_sha256:
        raise CorruptCheckpoint(f"{commit.manifest} is not what was committed: its checksum differs.")
    return Manifest.parse(data, commit.manifest)


def _first(error: ValidationError) -> str:
    first = error.errors()[0]
    return f"{'.'.join(map(str, first['loc']))}: {first['msg']}"
