"""A manifest is believed only as far as it makes sense."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from spottrain.checkpoint.errors import CheckpointMismatch, CorruptCheckpoint
from spottrain.checkpoint.format.commits import Commit
from spottrain.checkpoint.format.manifest import (
    Chunk,
    DataFile,
    Entry,
    Manifest,
    Receipt,
    block_checksums,
    build_manifest,
    index_tensors,
    parse_manifest,
    serialise,
)


def chunk(rank: int = 0, begin: int = 0, rows: int = 2, offset: int = 0) -> Chunk:
    """`rows` rows of two float32."""
    return Chunk(rank=rank, begin=begin, end=begin + rows * 8, offsets=(offset, 0), lengths=(rows, 2))


def entry(part: Chunk, dtype: str = "float32", rows: int = 4) -> Entry:
    return Entry(fqn="w", dtype=dtype, shape=(rows, 2), chunk=part)


def receipt(rank: int, *entries: Entry, size: int = 64) -> Receipt:
    return Receipt(
        rank=rank, world_size=2, file=DataFile(size=size, crc32=(0,)), entries=entries, rank_state={"rank": rank}
    )


SAVED_AT = "2026-11-21T00:00:00.000+00:00"


def manifest() -> Manifest:
    receipts = [receipt(0, entry(chunk())), receipt(1, entry(chunk(rank=1, offset=2)))]
    return build_manifest(receipts, generation=1, step=7, tree={"a": None}, extra={"lr": 0.1}, saved_at=SAVED_AT)


def committed(data: bytes, sha256: str) -> Commit:
    return Commit(generation=1, step=7, attempt="attempts/a/", manifest_sha256=sha256, committed_at="2026-11-21")


def test_a_manifest_comes_back_as_it_was() -> None:
    data, sha256 = serialise(manifest())
    assert parse_manifest(data, committed(data, sha256)) == manifest()
    assert manifest().rank_states == ({"rank": 0}, {"rank": 1})


@given(st.integers(0), st.integers(0, 7))
def test_any_flipped_bit_is_noticed(position: int, bit: int) -> None:
    data, sha256 = serialise(manifest())
    flipped = bytearray(data)
    flipped[position % len(data)] ^= 1 << bit
    with pytest.raises(CorruptCheckpoint, match="its checksum differs"):
        parse_manifest(bytes(flipped), committed(data, sha256))


def test_another_format_version_gets_a_sentence() -> None:
    data, sha256 = serialise(manifest().model_copy(update={"format_version": 9}))
    with pytest.raises(CheckpointMismatch, match="of format version 9; this spottrain reads 1"):
        parse_manifest(data, committed(data, sha256))


@pytest.mark.parametrize(
    ("entries", "problem"),
    [
        ([entry(chunk())], "exactly once"),
        ([entry(chunk()), entry(chunk(offset=2)), entry(chunk(offset=2))], "exactly once"),
        ([entry(chunk(rows=4), dtype="object")], "unknown dtype"),
        ([entry(chunk(rows=4), dtype="float64")], "bytes do not fit"),
        ([entry(chunk(offset=3)), entry(chunk())], "beyond its tensor"),
        ([entry(chunk()), entry(chunk(offset=2), dtype="int32")], "disagree about the type"),
        ([entry(Chunk(rank=0, begin=0, end=16, offsets=(0,), lengths=(4,)))], "number of dimensions"),
    ],
    ids=["gap", "twice", "dtype", "bytes", "bounds", "disagreement", "dimensions"],
)
def test_chunks_that_do_not_make_the_tensor_are_refused(entries: list[Entry], problem: str) -> None:
    with pytest.raises(CorruptCheckpoint, match=problem):
        index_tensors(entries)


@pytest.mark.parametrize(
    "change",
    [{"world_size": 3}, {"rank_states": []}, {"files": [{"size": 8, "crc32": [0]}] * 2}],
    ids=["world size", "rank states", "file too short"],
)
def test_a_manifest_that_contradicts_itself_is_refused(change: dict[str, Any]) -> None:
    with pytest.raises(ValidationError):
        Manifest.model_validate({**manifest().model_dump(), **change})


@given(st.binary(max_size=64), st.integers(1, 16))
def test_every_block_has_a_checksum(data: bytes, block_bytes: int) -> None:
    checksums = block_checksums(data, block_bytes)
    DataFile(size=len(data), block_bytes=block_bytes, crc32=checksums)
