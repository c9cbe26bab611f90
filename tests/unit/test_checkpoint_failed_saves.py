"""Saves end, well or not, whatever their store raises."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import pytest
import torch

from memory_storage import MemoryStorage
from rank_parts import save_task
from spottrain.checkpoint.checkpointer import Checkpointer
from spottrain.checkpoint.errors import (
    CheckpointError,
    RankFailed,
    SaveFailed,
    StorageFull,
    StorageUnavailable,
    error_from_json,
    error_to_json,
)
from spottrain.checkpoint.format.head import HEAD_KEY
from spottrain.checkpoint.stores.storage import Buffer
from spottrain.world.failures import save_failure
from spottrain_api.contract.reports import FailureReason


class BrokenStorage(MemoryStorage):
    """Each write, list or delete raises the next of these errors, while there is one."""

    def __init__(self, *errors: BaseException) -> None:
        super().__init__()
        self._errors = iter(errors)

    def _break(self) -> None:
        for error in self._errors:
            raise error

    def put(self, key: str, data: Buffer, *, if_match: str | None = None, if_absent: bool = False) -> str:
        self._break()
        return super().put(key, data, if_match=if_match, if_absent=if_absent)

    def list(self, prefix: str) -> Iterator[tuple[str, int]]:
        self._break()
        return super().list(prefix)

    def delete(self, keys: Iterable[str]) -> None:
        self._break()
        super().delete(keys)


@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize("first", [StorageFull("it is full"), RuntimeError("first")], ids=["full", "unexpected"])
@pytest.mark.parametrize("then", [StorageUnavailable("gone"), RuntimeError("second")], ids=["gone", "unexpected"])
def test_a_save_ends_also_when_what_follows_its_failure_fails(
    rank: int, first: Exception, then: Exception, caplog: pytest.LogCaptureFixture
) -> None:
    broken = save_task(BrokenStorage(first, then), rank)
    broken.run()
    assert broken.handle.done
    with pytest.raises(CheckpointError, match=str(first)):
        broken.handle.wait()
    assert str(then) in caplog.text


def test_what_another_rank_met_is_the_reason_that_rank_0_reports() -> None:
    storage = BrokenStorage(StorageFull("the disk is full"))
    save_task(storage, 1).run()
    given_up = save_task(storage, 0)
    given_up.run()
    with pytest.raises(RankFailed) as failed:
        given_up.handle.wait()
    failure = save_failure(failed.value)
    assert failure.reason is FailureReason.CHECKPOINT_STORAGE_FULL
    assert failure.message == "The checkpoint at step 10 was given up, because rank 1 failed: the disk is full"
    assert failure == save_failure(error_from_json(error_to_json(failed.value)))


@pytest.mark.parametrize("in_background", [False, True])
def test_a_store_that_raises_what_nobody_expects_keeps_no_later_save_back(in_background: bool) -> None:
    storage = BrokenStorage(RuntimeError("first"), RuntimeError("second"))
    saver = Checkpointer(storage, generation=1, attempt_id="a", rank=0, world_size=1)
    with pytest.raises(SaveFailed, match=r"The checkpoint at step 10 failed: RuntimeError\('first'\)"):
        save(saver, 10, in_background)
    assert save(saver, 20, in_background) == 20


def save(saver: Checkpointer, step: int, in_background: bool = False) -> int:
    begin = saver.save_in_background if in_background else saver.save
    handle = begin({"w": torch.ones(3)}, step=step)
    assert handle is not None
    commit = handle.wait(60)
    assert commit is not None
    return commit.step


def test_a_save_that_is_interrupted_is_not_taken_for_a_commit() -> None:
    interrupted = save_task(BrokenStorage(KeyboardInterrupt()), 1)
    with pytest.raises(KeyboardInterrupt):
        interrupted.run()
    with pytest.raises(SaveFailed, match="was interrupted"):
        interrupted.handle.wait(0.0)


class SilentStorage(MemoryStorage):
    """Takes one more HEAD when it is about to fall silent, and then answers nothing.

    The write of that HEAD gets no answer, either.
    """

    about_to_fall_silent = False
    is_silent = False

    def put(self, key: str, data: Buffer, *, if_match: str | None = None, if_absent: bool = False) -> str:
        self._answer()
        etag = super().put(key, data, if_match=if_match, if_absent=if_absent)
        self.is_silent = self.about_to_fall_silent and key == HEAD_KEY
        self._answer()
        return etag

    def get(self, key: str) -> tuple[bytes, str]:
        self._answer()
        return super().get(key)

    def _answer(self) -> None:
        if self.is_silent:
            raise StorageUnavailable("no answer")


@pytest.mark.parametrize("is_back", [True, False], ids=["store-is-back", "store-stays-silent-for-a-retry"])
def test_a_commit_whose_answer_was_lost_is_found_again(is_back: bool) -> None:
    storage = SilentStorage()
    saver = Checkpointer(storage, generation=1, attempt_id="a", rank=0, world_size=1)
    storage.about_to_fall_silent = True
    with pytest.raises(StorageUnavailable):
        save(saver, 10, in_background=True)
    storage.about_to_fall_silent = False
    storage.is_silent = not is_back
    written = list(storage.list(""))
    if not is_back:
        with pytest.raises(StorageUnavailable):
            save(saver, 10)
        storage.is_silent = False
    assert save(saver, 10) == 10
    assert list(storage.list("")) == written
    assert save(saver, 20) == 20


class ForgetfulStorage(MemoryStorage):
    """What is read of the objects of some keys isn't what was written."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind = kind

    def read_into(self, key: str, begin: int, target: memoryview) -> int:
        length = super().read_into(key, begin, target)
        if key.endswith(self.kind):
            target[0] ^= 1
        return length

    def get(self, key: str) -> tuple[bytes, str]:
        data, version = super().get(key)
        return (data.replace(b'"step"', b'"stop"') if key.endswith(self.kind) else data), version


@pytest.mark.parametrize(
    ("kind", "said"),
    [
        ("rank-00000.data", "The store gives other bytes for state.large in attempts/"),
        ("manifest.json", "manifest.json is not what was committed: its checksum differs"),
    ],
)
def test_a_first_commit_that_no_resume_could_load_is_not_made(kind: str, said: str) -> None:
    storage = ForgetfulStorage(kind)
    saver = Checkpointer(storage, generation=1, attempt_id="a", rank=0, world_size=1)
    saver.latest()
    state = {"state": {"large": torch.ones(100), "small": torch.ones(3)}}
    for step in (1, 2):
        handle = saver.save_in_background(state, step=step)
        assert handle is not None
        with pytest.raises(CheckpointError, match=said):
            handle.wait()
        assert saver.latest() is None
    storage.kind = "nothing"
    handle = saver.save_in_background(state, step=3)
    assert handle is not None
    handle.wait()
    # Later ones of the same structure are not read again: a drain has no time for it.
    storage.kind = kind
    for step, save in ((4, saver.save_in_background), (5, saver.save)):
        found = save(state, step=step)
        assert found is not None
        found.wait()
