"""Reading parts of data files.

Every byte that is wanted comes once, verified, and no block is fetched twice.
"""

from __future__ import annotations

import random
from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from memory_storage import MemoryStorage
from spottrain.checkpoint.errors import CorruptCheckpoint
from spottrain.checkpoint.format.manifest import DataFile, Manifest, block_checksums, data_key
from spottrain.checkpoint.format.part_reader import PartReader, Span

BLOCK = 16
SIZES = (100, 1, 64)


class CountingStorage(MemoryStorage):
    """Counts how often each block is fetched."""

    def __init__(self) -> None:
        super().__init__()
        self.fetched: Counter[tuple[str, int]] = Counter()

    def read_into(self, key: str, offset: int, memory: memoryview) -> int:
        assert offset % BLOCK == 0
        self.fetched.update((key, block) for block in range(offset // BLOCK, -(-(offset + len(memory)) // BLOCK)))
        return super().read_into(key, offset, memory)


def stored() -> tuple[CountingStorage, Manifest, list[bytes]]:
    storage, generator = CountingStorage(), random.Random(1)
    files = [generator.randbytes(size) for size in SIZES]
    for rank, data in enumerate(files):
        storage.upload(data_key("a/", rank), data)
    manifest = Manifest(
        generation=1,
        step=1,
        world_size=len(files),
        files=tuple(DataFile(size=len(d), block_bytes=BLOCK, crc32=block_checksums(d, BLOCK)) for d in files),
        tensors={},
        tree={},
        rank_states=(None,) * len(files),
        extra={},
        saved_at="2026-11-21",
    )
    return storage, manifest, files


@st.composite
def spans(draw: st.DrawFn) -> Span:
    rank = draw(st.integers(0, len(SIZES) - 1))
    begin = draw(st.integers(0, SIZES[rank]))
    return rank, begin, draw(st.integers(begin, SIZES[rank]))


@given(wanted=st.lists(spans(), max_size=8), read_bytes=st.sampled_from([1, 32, 1 << 20]))
def test_every_byte_comes_once_and_every_block_is_fetched_once(wanted: list[Span], read_bytes: int) -> None:
    storage, manifest, files = stored()
    found = [bytearray(end - begin) for _, begin, end in wanted]
    taken = [0] * len(wanted)

    def deliver(index: int, offset: int, data: memoryview) -> None:
        found[index][offset : offset + len(data)] = data
        taken[index] += len(data)

    PartReader(storage, "a/", manifest, read_bytes=read_bytes).read(wanted, deliver)
    assert found == [files[rank][begin:end] for rank, begin, end in wanted]
    assert taken == [end - begin for _, begin, end in wanted]
    assert all(times == 1 for times in storage.fetched.values())


@pytest.mark.parametrize("damage", [b"\0" * 64, b"short"], ids=["altered", "cut short"])
def test_damaged_bytes_are_never_delivered(damage: bytes) -> None:
    storage, manifest, _ = stored()
    storage.upload(data_key("a/", 2), damage)
    with pytest.raises(CorruptCheckpoint, match="rank-00002"):
        PartReader(storage, "a/", manifest).read([(2, 0, 64)], lambda *_: pytest.fail("delivered"))


def test_an_error_of_the_receiver_is_raised() -> None:
    storage, manifest, _ = stored()

    def refuse(*_: object) -> None:
        raise IndexError("no room")

    with pytest.raises(IndexError, match="no room"):
        PartReader(storage, "a/", manifest, read_bytes=BLOCK).read([(0, 0, 100)], refuse)
