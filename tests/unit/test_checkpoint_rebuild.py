"""A HEAD that is missing or damaged costs no commit."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from memory_storage import MemoryStorage
from spottrain.checkpoint.checkpointer import Checkpointer
from spottrain.checkpoint.errors import CheckpointMismatch, CorruptCheckpoint, Fenced
from spottrain.checkpoint.format.commits import Head
from spottrain.checkpoint.format.head import HEAD_KEY, fence, read_head
from spottrain.checkpoint.format.manifest import Manifest, serialise
from spottrain.checkpoint.saving.retention import Retention


def checkpointer(storage: MemoryStorage, generation: int) -> Checkpointer:
    return Checkpointer(storage, generation=generation, attempt_id=f"a{generation}", rank=0, world_size=1)


def save(storage: MemoryStorage, generation: int, *steps: int) -> Checkpointer:
    saver = checkpointer(storage, generation)
    saver.latest()
    for step in steps:
        saver.save({"w": torch.full((3,), float(step))}, step=step)
    return saver


def head_of(storage: MemoryStorage) -> Head:
    head = read_head(storage)
    assert head is not None
    return head


def steps(storage: MemoryStorage) -> list[int]:
    return [commit.step for commit in head_of(storage).commits]


def key_of(storage: MemoryStorage, step: int, name: str) -> str:
    (key,) = [key for key, _ in storage.list("attempts/") if f"s{step:09d}" in key and key.endswith(name)]
    return key


def flipped(data: bytes, position: int, bit: int = 0) -> bytes:
    return data[:position] + bytes([data[position] ^ (1 << bit)]) + data[position + 1 :]


def damages(head: bytes) -> Iterator[bytes | None]:
    """What may become of HEAD.

    It is gone, cut anywhere, has a bit of one byte flipped (each byte in turn), or holds what a different program may
    have written there.
    """
    yield None
    yield from (head[:length] for length in range(len(head)))
    yield from (flipped(head, position, position % 8) for position in range(len(head)))
    yield from (b"[]", b"null", b"{}", b"\0" * len(head), head + head)


def test_whatever_becomes_of_head_the_newest_commit_is_found_and_kept() -> None:
    storage = MemoryStorage()
    save(storage, 1, 10, 20)
    before, whole = head_of(storage), storage.get(HEAD_KEY)[0]
    objects = dict(storage.list("attempts/"))
    for damaged in damages(whole):
        storage.delete([HEAD_KEY])
        if damaged is not None:
            storage.put(HEAD_KEY, damaged)
        resumed = checkpointer(storage, 2)
        assert resumed.latest() == before.newest, damaged
        assert resumed.has_rebuilt_head
        assert resumed.clean_up(Retention()) == 0
        assert head_of(storage) == before.model_copy(update={"fence": 2})
        assert dict(storage.list("attempts/")) == objects


def test_a_save_makes_head_anew_and_forgets_nothing() -> None:
    for damaged in (None, b"", b"{"):
        storage = MemoryStorage()
        saver = save(storage, 1, 10, 20)
        storage.delete([HEAD_KEY])
        if damaged is not None:
            storage.put(HEAD_KEY, damaged)
        saver.save({"w": torch.zeros(3)}, step=30)
        assert steps(storage) == [30, 20, 10]
        assert not head_of(storage).rebuilt
        saver.clean_up(Retention())
        assert steps(storage) == [30, 20]


def test_only_what_is_whole_counts() -> None:
    storage = MemoryStorage()
    save(storage, 1, 10, 20, 30, 40, 50)
    storage.delete([HEAD_KEY, key_of(storage, 50, "manifest.json"), key_of(storage, 40, ".data")])
    cut = key_of(storage, 30, ".data")
    storage.put(cut, storage.get(cut)[0][:-1])
    manifest = key_of(storage, 20, "manifest.json")
    storage.put(manifest, flipped(storage.get(manifest)[0], 40))
    storage.put("attempts/of another form/manifest.json", b"not ours")
    assert steps(storage) == [10]


def test_a_manifest_with_a_time_that_is_none_is_passed_over() -> None:
    storage = MemoryStorage()
    save(storage, 1, 10, 20)
    key = key_of(storage, 20, "manifest.json")
    manifest = Manifest.parse(storage.get(key)[0], key)
    storage.put(key, serialise(manifest.model_copy(update={"saved_at": "long ago"}))[0])
    storage.delete([HEAD_KEY])
    assert [commit.step for commit in head_of(storage).commits] == [10]


def test_a_head_with_a_time_that_is_none_is_rebuilt() -> None:
    storage = MemoryStorage()
    save(storage, 1, 10)
    before = head_of(storage)
    odd = before.commits[0].model_copy(update={"committed_at": "long ago"})
    storage.put(HEAD_KEY, before.model_copy(update={"commits": (odd,)}).serialise())
    assert head_of(storage) == before.model_copy(update={"rebuilt": True})


def test_a_newer_generation_comes_first_and_shuts_older_ones_out() -> None:
    storage = MemoryStorage()
    late = save(storage, 1, 10, 20, 30)
    newer = checkpointer(storage, 2)
    newest = newer.latest()
    assert newest is not None
    storage.delete([key_of(storage, 30, ".data")])
    before = head_of(storage).commits[1]
    newer.load(lambda _: {"w": torch.zeros(3)}, before)
    newer.save({"w": torch.zeros(3)}, step=25)
    storage.delete([HEAD_KEY])
    assert steps(storage) == [25, 20, 10]
    with pytest.raises(Fenced):
        late.save({"w": torch.zeros(3)}, step=40)
    with pytest.raises(Fenced):
        fence(storage, 1)


def test_where_nothing_is_whole_a_damaged_head_is_left_for_people() -> None:
    storage = MemoryStorage()
    save(storage, 1, 10)
    storage.put(HEAD_KEY, b"{")
    storage.delete([key_of(storage, 10, ".data")])
    with pytest.raises(CorruptCheckpoint, match="the store holds no whole checkpoint"):
        fence(storage, 2)
    assert storage.get(HEAD_KEY)[0] == b"{"


def test_checkpoints_of_another_version_are_not_taken_for_none() -> None:
    storage = MemoryStorage()
    save(storage, 1, 10)
    storage.delete([HEAD_KEY])
    manifest = key_of(storage, 10, "manifest.json")
    storage.put(manifest, b'{"format_version":7}')
    with pytest.raises(CheckpointMismatch, match="of format version 7"):
        fence(storage, 2)
