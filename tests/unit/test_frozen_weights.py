"""Frozen weights are written once, and stay as long as a commit refers to them."""

from __future__ import annotations

import threading
from typing import Any

import pytest
import torch

from memory_storage import MemoryStorage
from spottrain.checkpoint.checkpointer import Checkpointer
from spottrain.checkpoint.errors import CorruptCheckpoint, FrozenWeightsGone, StorageUnavailable
from spottrain.checkpoint.format.commits import Head
from spottrain.checkpoint.format.head import HEAD_KEY, fence, read_head
from spottrain.checkpoint.format.manifest import FROZEN_SUFFIX
from spottrain.checkpoint.saving.retention import Retention, clean_up
from spottrain.checkpoint.stores.storage import Buffer, Pieces, whole
from staging_memory import staging_memory

FROZEN = {"model.base", "model.table"}
BASE_BYTES = 400_000
ADAPTER_BYTES = 20_000


def checkpointer(storage: MemoryStorage, generation: int = 1) -> Checkpointer:
    made = Checkpointer(storage, generation=generation, attempt_id="a", rank=0, world_size=1)
    made.latest()
    return made


def state(step: float, *, base: float = 7.0) -> dict[str, Any]:
    """The base is the same at each step, the adapter and its momentum aren't."""
    return {
        "model": {
            "base": torch.full((BASE_BYTES // 8,), base),
            "table": torch.arange(BASE_BYTES // 8, dtype=torch.int32),
            "adapter": torch.full((ADAPTER_BYTES // 8,), float(step)),
        },
        "optimizer": {"state.adapter.momentum": torch.full((ADAPTER_BYTES // 8,), -float(step))},
    }


def save(saver: Checkpointer, *steps: int, of: dict[str, Any] | None = None) -> None:
    for step in steps:
        saver.save(of or state(step), step=step, frozen=FROZEN)


def head_of(storage: MemoryStorage) -> Head:
    head = read_head(storage)
    assert head is not None
    return head


def frozen_files(storage: MemoryStorage) -> list[str]:
    return [key for key, _ in storage.list("attempts/") if key.endswith(FROZEN_SUFFIX)]


def bytes_of(storage: MemoryStorage, step: int) -> int:
    """What the attempt of a step has in the store."""
    return sum(size for key, size in storage.list("attempts/") if f"-s{step:09d}-" in key)


def assert_whole(storage: MemoryStorage, *steps: int, generation: int = 9) -> None:
    """HEAD names the commits of these steps, newest first.

    Each holds what was saved, to the bit.
    """
    reader = checkpointer(storage, generation)
    commits = head_of(storage).commits
    assert [commit.step for commit in commits] == list(steps)
    for commit in commits:
        found = reader.load(lambda _: state(-1, base=0.0), commit, frozen=FROZEN).state
        wanted = state(commit.step)
        for part in wanted:
            for name, tensor in wanted[part].items():
                assert torch.equal(found[part][name], tensor), (commit.step, name)
    assert reader.latest(verify=True) == head_of(storage).newest


def test_from_the_second_commit_on_only_what_is_trained_is_written() -> None:
    storage = MemoryStorage()
    saver = checkpointer(storage)
    save(saver, 10, 20, 30)

    assert bytes_of(storage, 10) > BASE_BYTES
    for step in (20, 30):
        assert bytes_of(storage, step) + len(storage.get(HEAD_KEY)[0]) < 1.25 * ADAPTER_BYTES  # JSON of 3 kB with it
    assert len(frozen_files(storage)) == 1
    assert_whole(storage, 30, 20, 10)


def test_clean_up_keeps_frozen_weights_as_long_as_a_commit_needs_them_and_no_longer() -> None:
    storage = MemoryStorage()
    saver = checkpointer(storage)
    save(saver, 10, 20, 30)
    first = head_of(storage).commits[-1].attempt
    clean_up(storage, 1, Retention(last=1))
    assert [commit.step for commit in head_of(storage).commits] == [30]
    assert [key for key, _ in storage.list(first)] == frozen_files(storage)
    assert_whole(storage, 30, generation=1)

    fresh = checkpointer(storage, 2)  # has loaded nothing, so that it has no weights to refer to
    save(fresh, 40)
    clean_up(storage, 2, Retention(last=2))
    assert len(frozen_files(storage)) == 2
    clean_up(storage, 2, Retention(last=1))
    assert list(storage.list(first)) == []
    assert_whole(storage, 40)


def test_the_next_generation_refers_to_what_it_has_loaded_and_says_what_it_replaced() -> None:
    storage = MemoryStorage()
    save(checkpointer(storage), 10)
    newest = head_of(storage).newest
    assert newest is not None
    resumed = checkpointer(storage, 2)
    brought = state(0, base=8.0)
    loaded = resumed.load(lambda _: brought, newest, frozen=FROZEN)
    assert loaded.replaced == ("model.base",)
    assert torch.equal(brought["model"]["base"], state(0)["model"]["base"])
    save(resumed, 20)
    assert len(frozen_files(storage)) == 1

    again = checkpointer(storage, 3)
    newest = head_of(storage).newest
    assert newest is not None
    assert again.load(lambda _: state(0), newest, frozen=FROZEN).replaced == ()
    assert_whole(storage, 20, 10)


def test_a_base_that_was_overwritten_by_a_load_that_failed_is_reported_of_all_the_same() -> None:
    storage = MemoryStorage()
    saver = checkpointer(storage)
    save(saver, 10, 20)
    newest, before = head_of(storage).commits
    key = f"{newest.attempt}rank-00000.data"
    storage.put(key, storage.get(key)[0][:-1] + b"x")
    brought = state(0, base=8.0)
    resumed = checkpointer(storage, 2)
    with pytest.raises(CorruptCheckpoint):
        resumed.load(lambda _: brought, newest, frozen=FROZEN)
    assert resumed.load(lambda _: brought, before, frozen=FROZEN).replaced == ("model.base",)


def test_what_the_script_changes_by_itself_is_saved_as_it_is() -> None:
    """A teacher isn't trained, and follows the student by a moving average."""
    storage = MemoryStorage()
    saver = checkpointer(storage)
    sizes = []
    for step in (10, 20, 30):
        save(saver, step, of=state(step, base=float(step)))
        sizes.append(bytes_of(storage, step))
    assert len(frozen_files(storage)) == 1
    assert sizes[1] < BASE_BYTES  # what didn't change is not in it
    for commit in head_of(storage).commits:
        found = checkpointer(storage, 2).load(lambda _: state(0), commit, frozen=FROZEN).state
        assert torch.equal(found["model"]["base"], state(0, base=float(commit.step))["model"]["base"])
    resumed, newest = checkpointer(storage, 3), head_of(storage).newest
    assert newest is not None
    assert resumed.load(lambda _: state(0, base=1.0), newest, frozen=FROZEN).replaced == ()  # it is no base
    save(resumed, 40, of=state(40, base=40.0))
    assert len(frozen_files(storage)) == 1


class FailingStorage(MemoryStorage):
    """Uploads of keys that end like this fail."""

    ending: str | None = None

    def upload(self, key: str, data: Buffer | Pieces) -> None:
        if self.ending is not None and key.endswith(self.ending):
            raise StorageUnavailable("the store is away")
        super().upload(key, data)


@pytest.mark.parametrize("ending", [FROZEN_SUFFIX, "rank-00000.data", "manifest.json"])
def test_what_a_save_that_failed_has_written_is_referred_to_by_none(ending: str) -> None:
    storage = FailingStorage()
    saver = checkpointer(storage)
    storage.ending = ending
    with pytest.raises(StorageUnavailable):
        save(saver, 10)
    storage.ending = None
    save(saver, 20, 30)
    assert head_of(storage).commits[0].needs == (head_of(storage).commits[1].attempt,)
    clean_up(storage, 1, Retention(last=2))
    assert len(frozen_files(storage)) == 1
    assert_whole(storage, 30, 20)


class CuttingStorage(MemoryStorage):
    """Stores frozen weights without their last byte."""

    def upload(self, key: str, data: Buffer | Pieces) -> None:
        super().upload(key, whole(data)[:-1] if key.endswith(FROZEN_SUFFIX) else data)


def test_frozen_weights_that_are_not_stored_as_they_were_written_are_not_committed() -> None:
    storage = CuttingStorage()
    with pytest.raises(CorruptCheckpoint, match=r"Rank 0 wrote \d+ bytes at step 10, but the store holds \d+"):
        save(checkpointer(storage), 10)
    assert head_of(storage).commits == ()


def test_memory_for_frozen_weights_is_held_until_they_are_written() -> None:
    before = staging_memory()  # of other tests

    def largest() -> int:
        return max(size for inode, size in staging_memory().items() if inode not in before)

    saver = checkpointer(MemoryStorage())
    saver.prepare(state(0), frozen=FROZEN)
    assert largest() >= BASE_BYTES
    save(saver, 10, 20)
    assert ADAPTER_BYTES <= largest() < BASE_BYTES


class WaitingStorage(MemoryStorage):
    """Uploads end once `may_go_on` is set."""

    def __init__(self) -> None:
        super().__init__()
        self.may_go_on = threading.Event()

    def upload(self, key: str, data: Buffer | Pieces) -> None:
        self.may_go_on.wait()
        super().upload(key, data)


def test_no_memory_is_held_for_frozen_weights_that_a_save_is_writing() -> None:
    before = staging_memory()  # of other tests

    def largest() -> int:
        return max(size for inode, size in staging_memory().items() if inode not in before)

    storage = WaitingStorage()
    saver = checkpointer(storage)
    handle = saver.save_in_background(state(1), step=1, frozen=FROZEN)
    assert handle is not None
    saver.prepare(state(1), frozen=FROZEN)  # as after a first step that is committed
    storage.may_go_on.set()
    handle.wait()
    save(saver, 10)
    assert ADAPTER_BYTES <= largest() < BASE_BYTES
    assert len(frozen_files(storage)) == 1


@pytest.mark.parametrize("in_background", [False, True])
def test_weights_that_are_gone_from_the_store_are_written_anew(in_background: bool) -> None:
    storage = MemoryStorage()
    saver = checkpointer(storage)
    save(saver, 10, 20)
    storage.delete(frozen_files(storage))
    handle = saver.save_in_background(state(30), step=30, frozen=FROZEN)
    assert handle is not None
    with pytest.raises(FrozenWeightsGone, match=r"rank-00000\.frozen\.data, which holds frozen weights"):
        handle.wait()
    save_again = saver.save_in_background if in_background else saver.save
    newest = save_again(state(40), step=40, frozen=FROZEN)
    assert newest is not None
    newest.wait()
    reader = checkpointer(storage, 2)
    found = reader.latest(verify=True)
    assert found is not None
    assert found.step == 40


def test_damaged_weights_cost_each_commit_that_needs_them_and_no_other() -> None:
    storage = MemoryStorage()
    save(checkpointer(storage), 10)
    save(checkpointer(storage, 2), 20, 30)  # with weights of its own, as it has loaded nothing
    (damaged,) = [key for key in frozen_files(storage) if "-s000000020-" in key]
    storage.put(damaged, b"x" + storage.get(damaged)[0][1:])
    found = checkpointer(storage, 3).latest(verify=True)
    assert found is not None
    assert found.step == 10
    other = frozen_files(storage)[0]
    storage.delete([other])
    with pytest.raises(CorruptCheckpoint, match="None of the 3 kept checkpoints is whole"):
        checkpointer(storage, 4).latest(verify=True)


def test_a_commit_whose_weights_a_rival_has_dropped_is_refused() -> None:
    storage = MemoryStorage()
    late = checkpointer(storage)
    save(late, 10)
    rival = Checkpointer(storage, generation=1, attempt_id="a", rank=0, world_size=1)
    save(rival, 20)
    gone = frozen_files(storage)[0]
    whole = storage.get(gone)[0]
    clean_up(storage, 1, Retention(last=1))
    assert len(frozen_files(storage)) == 1
    storage.put(gone, whole)  # deleted a moment later: after the late one has looked
    with pytest.raises(FrozenWeightsGone, match="no commit holds the frozen weights"):
        save(late, 30)
    save(late, 40)
    clean_up(storage, 1, Retention(last=2))
    assert_whole(storage, 40, 20)


def test_head_is_made_anew_from_commits_that_need_others() -> None:
    storage = MemoryStorage()
    save(checkpointer(storage), 10, 20, 30)
    clean_up(storage, 1, Retention(last=2))
    before = head_of(storage)
    storage.delete([HEAD_KEY])
    assert head_of(storage).commits == before.commits
    fence(storage, 2)
    clean_up(storage, 2, Retention(last=2))
    assert_whole(storage, 30, 20)
    storage.delete([HEAD_KEY, *frozen_files(storage)])
    assert read_head(storage) is None


def test_a_resume_freezes_what_the_commit_before_trained() -> None:
    storage = MemoryStorage()
    saver = checkpointer(storage)
    saver.save(state(10), step=10)
    assert b'"format_version": 1' in storage.get(HEAD_KEY)[0]

    resumed, old = checkpointer(storage, 2), head_of(storage).newest
    assert old is not None
    assert resumed.load(lambda _: state(0, base=8.0), old, frozen=FROZEN).replaced == ("model.base",)
    save(resumed, 20, 30)
    assert bytes_of(storage, 30) < BASE_BYTES
    assert_whole(storage, 30, 20, 10)


def test_what_is_trained_at_last_is_in_each_commit_and_what_is_frozen_at_last_in_one() -> None:
    storage = MemoryStorage()
    saver = checkpointer(storage)
    save(saver, 10)
    for step, frozen in ((20, {"model.base"}), (30, FROZEN), (40, {*FROZEN, "model.adapter"})):
        saver.save(state(step), step=step, frozen=frozen)
    assert_whole(storage, 40, 30, 20, 10)
    assert bytes_of(storage, 20) > BASE_BYTES // 2


class Wrapped(torch.Tensor):
    """A tensor of which only its class knows what it is."""


def test_what_cannot_be_compared_is_in_each_commit() -> None:
    storage = MemoryStorage()
    saver = checkpointer(storage)
    for step in (10, 20):
        odd = state(step)
        odd["model"]["base"] = odd["model"]["base"].as_subclass(Wrapped)
        save(saver, step, of=odd)
    assert bytes_of(storage, 20) > BASE_BYTES // 2
    assert_whole(storage, 20, 10)
