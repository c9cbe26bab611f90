"""A store without room.

What a save that fails leaves, and what is deleted so that later ones succeed.
"""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import pytest

from cluster_fixtures import wait_for
from memory_storage import MemoryStorage
from rank_parts import save_task
from saved_steps import checkpointer, resumed_step, save, state
from spottrain.checkpoint.errors import SaveFailed, StorageFull
from spottrain.checkpoint.format.head import read_head
from spottrain.checkpoint.saving.retention import Retention
from spottrain.checkpoint.stores.storage import Buffer


class FullStorage(MemoryStorage):
    """There is no room for one kind of object, or the answer to writing it is lost."""

    no_room_for = ""
    takes_effect = False

    def put(self, key: str, data: Buffer, *, if_match: str | None = None, if_absent: bool = False) -> str:
        if self.no_room_for and key.endswith(self.no_room_for):
            if self.takes_effect:
                super().put(key, data, if_match=if_match, if_absent=if_absent)
            raise StorageFull("the disk is full")
        return super().put(key, data, if_match=if_match, if_absent=if_absent)


@pytest.mark.parametrize("what", [".data", ".receipt.json", "manifest.json"])
def test_a_save_that_fails_leaves_nothing_that_fills_the_store(what: str) -> None:
    storage = FullStorage()
    save(storage, 1, 10)
    before = [*storage.list("")]
    storage.no_room_for = what
    with pytest.raises(StorageFull):
        save(storage, 2, 20)
    storage.no_room_for = ""
    assert [item for item in storage.list("") if item[0] != "HEAD"] == [item for item in before if item[0] != "HEAD"]
    assert resumed_step(storage, 3) == 10


def test_a_save_that_head_may_name_is_left_alone() -> None:
    storage = FullStorage()
    saver = checkpointer(storage, 1)
    saver.latest()
    storage.no_room_for, storage.takes_effect = "HEAD", True
    saver.save(state(10), step=10, extra={"step": 10})  # settled by reading HEAD again
    storage.takes_effect = False
    with pytest.raises(StorageFull):
        saver.save(state(20), step=20, extra={"step": 20})
    storage.no_room_for = ""
    assert resumed_step(storage, 2) == 10
    assert [key for key, _ in storage.list("attempts/") if "s000000020" in key]


def test_when_one_rank_finds_no_room_what_the_others_wrote_goes() -> None:
    storage = FullStorage()
    first, second = (save_task(storage, rank) for rank in range(2))
    storage.no_room_for = "rank-00001.data"
    with ThreadPoolExecutor(2) as pool:
        for done in [pool.submit(first.run), pool.submit(second.run)]:
            done.result()
    assert isinstance(second.handle.error, StorageFull)
    assert isinstance(first.handle.error, SaveFailed)
    assert "because rank 1 failed: the disk is full" in str(first.handle.error)
    assert list(storage.list("")) == []


def test_a_rank_that_cannot_even_say_so_in_the_store_is_not_waited_for() -> None:
    storage = MemoryStorage()
    first = save_task(storage, 0)
    with ThreadPoolExecutor(1) as pool:
        run = pool.submit(first.run)
        failure = SaveFailed("as rank 1 failed: no route to the store")
        first.handle.give_up(failure)
        run.result()
    assert first.handle.error is failure
    assert list(storage.list("")) == []


def test_what_all_ranks_have_stored_is_committed_whatever_else_is_reported() -> None:
    storage = MemoryStorage()
    first, second = (save_task(storage, rank) for rank in range(2))
    second.run()
    first.handle.give_up(SaveFailed("as rank 1 failed: the answer was lost"))
    first.run()
    assert first.handle.commit is not None
    assert first.handle.error is None


class SmallStorage(MemoryStorage):
    """There is room for so many bytes."""

    room = 1 << 30

    def used(self) -> int:
        return sum(size for _, size in self.list(""))

    def put(self, key: str, data: Buffer, *, if_match: str | None = None, if_absent: bool = False) -> str:
        if key != "HEAD" and self.used() + len(data) > self.room:
            raise StorageFull("the disk is full")
        return super().put(key, data, if_match=if_match, if_absent=if_absent)


@pytest.mark.parametrize(("keep", "unfinished"), [(1, 0), (2, 1 << 20)], ids=["keep is lower", "a writer was lost"])
def test_a_full_store_is_rid_of_what_nobody_needs(keep: int, unfinished: int) -> None:
    storage = SmallStorage()
    save(storage, 1, 10)
    save(storage, 1, 20)
    storage.put("attempts/g000001-s000000030-lost/rank-00000.data", bytes(unfinished))
    storage.room = storage.used()
    saver = checkpointer(storage, 2, Retention(last=keep))
    saver.latest()
    with pytest.raises(StorageFull):
        saver.save(state(40), step=40)
    wait_for(lambda: storage.used() < storage.room, "something goes")
    wait_for(lambda: not any("lost" in key for key, _ in storage.list("")), "what was unfinished goes")
    saver.save(state(50), step=50, extra={"step": 50})
    assert resumed_step(storage, 3) == 50


@pytest.mark.parametrize("keep", [1, 2])
@pytest.mark.parametrize("when", ["after a resume", "after a failed save", "at the end of a run"])
def test_until_the_next_commit_clean_up_spares_the_one_behind_the_damaged_ones(keep: int, when: str) -> None:
    storage, lost = FullStorage(), "attempts/g000001-s000000030-lost/rank-00000.data"
    damaged = [100 + step for step in range(keep)]
    save(storage, 1, 50, *damaged)
    for key in [key for key, _ in storage.list("") if key.endswith(".data") and "s000000050" not in key]:
        storage.put(key, b"damaged")
    saver = checkpointer(storage, 2, Retention(last=keep))
    whole = saver.latest(verify=True)
    assert whole is not None
    saver.load(lambda _: state(0), whole)
    storage.put(lost, b"unfinished")
    if when == "after a resume":
        saver.clean_up_in_background()
    elif when == "after a failed save":
        storage.no_room_for = ".data"
        with pytest.raises(StorageFull):
            saver.save(state(160), step=160)
        storage.no_room_for = ""
    else:
        saver.clean_up(Retention(last=keep))
    wait_for(lambda: not [*storage.list(lost)], "a clean-up deletes what was unfinished")
    assert resumed_step(storage, 2) == 50
    for step in (160, 170):
        saver.save(state(step), step=step)
    saver.clean_up(Retention(last=keep))
    head = read_head(storage)
    assert head is not None
    assert [kept.step for kept in head.commits] == [170, 160][:keep]
