"""A process that dies, or a store that fails, at each operation in turn.

The commit is always the old one or the new one.
"""

from __future__ import annotations

import contextlib
import io
import pickle
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import CliRunner

from memory_storage import MemoryStorage
from saved_steps import checkpointer, resumed_step, save, state
from spottrain.checkpoint.errors import (
    CheckpointError,
    CheckpointMismatch,
    CorruptCheckpoint,
    Fenced,
    StorageUnavailable,
)
from spottrain.checkpoint.format.attempt import Attempt
from spottrain.checkpoint.format.commits import Commit
from spottrain.checkpoint.format.head import HEAD_KEY, read_head
from spottrain.checkpoint.saving.retention import Retention, clean_up
from spottrain.checkpoint.stores.file_storage import FileStorage
from spottrain.checkpoint.stores.storage import Buffer, Pieces
from spottrain.checkpoint.stores.uri import open_storage
from spottrain_cli.checkpoints import _unfinished, checkpoints


class Killed(BaseException):
    """The process died here."""


class FaultyStorage:
    """Passes calls on to a second store; one fails before or after its effect."""

    parallel_reads = 2

    def __init__(self, inner: MemoryStorage, at: int, error: type[BaseException], after: bool) -> None:
        self._inner = inner
        self._calls_left = at
        self._error = error
        self._after = after
        self.struck = False

    def _do(self, operation: Callable[[], Any]) -> Any:
        self._calls_left -= 1
        strikes = self._calls_left == 0
        self.struck |= strikes
        if strikes and not self._after:
            raise self._error("before")
        result = operation()
        if strikes:
            raise self._error("after")
        return result

    def put(self, key: str, data: Buffer, *, if_match: str | None = None, if_absent: bool = False) -> str:
        return str(self._do(lambda: self._inner.put(key, data, if_match=if_match, if_absent=if_absent)))

    def upload(self, key: str, data: Buffer | Pieces) -> None:
        self._do(lambda: self._inner.upload(key, data))

    def get(self, key: str) -> tuple[bytes, str]:
        found: tuple[bytes, str] = self._do(lambda: self._inner.get(key))
        return found

    def read_into(self, key: str, offset: int, memory: memoryview) -> int:
        return int(self._do(lambda: self._inner.read_into(key, offset, memory)))

    def list(self, prefix: str) -> Iterator[tuple[str, int]]:
        return iter(self._do(lambda: [*self._inner.list(prefix)]))

    def delete(self, keys: Iterable[str]) -> None:
        for key in keys:
            self._do(partial(self._inner.delete, [key]))

    def abandon_uploads(self, prefix: str, is_over: Callable[[str], bool]) -> int:
        return int(self._do(lambda: self._inner.abandon_uploads(prefix, is_over)))


@pytest.mark.parametrize("error", [Killed, StorageUnavailable])
@pytest.mark.parametrize("after", [False, True], ids=["before", "after"])
@pytest.mark.parametrize("head_is", ["whole", "gone", "damaged"])
def test_whatever_operation_fails_the_next_generation_resumes(
    error: type[BaseException], after: bool, head_is: str
) -> None:
    committed = set()
    for at in range(1, 1000):
        storage = MemoryStorage()
        save(storage, 1, 10, 20)
        if head_is == "gone":
            storage.delete([HEAD_KEY])
        elif head_is == "damaged":
            storage.put(HEAD_KEY, storage.get(HEAD_KEY)[0][:-7])
        faulty = FaultyStorage(storage, at, error, after)
        with contextlib.suppress(Killed, CheckpointError):
            save(faulty, 2, 30)
            checkpointer(faulty, 2).clean_up(Retention(last=1))
        head = read_head(storage)
        assert head is not None
        committed.add(resumed_step(storage, 3))
        save(storage, 3, 40)
        assert checkpointer(storage, 3).clean_up(Retention(last=1)) > 0
        assert len(list(storage.list(""))) == 4  # HEAD, manifest, data, receipt
        assert resumed_step(storage, 4) == 40
        if not faulty.struck:
            break
    assert at > 10
    assert committed == {20, 30}


def test_a_fenced_save_loses_and_says_so() -> None:
    storage = MemoryStorage()
    old = checkpointer(storage, 1)
    old.latest()
    save(storage, 2, 10)
    with pytest.raises(Fenced):
        old.save(state(50), step=50)
    with pytest.raises(Fenced):
        old.clean_up(Retention())
    assert resumed_step(storage, 2) == 10


def damage(storage: MemoryStorage, key: str, how: str) -> None:
    data = bytearray(storage.get(key)[0])
    if how == "flip":
        data[len(data) // 2] ^= 1
    if how == "cut":
        del data[-1]
    if how == "swap":
        # With the same file of another commit, which is sound in itself and of the same size.
        other = next(k for k, _ in storage.list("") if k != key and k.endswith(key.rpartition("/")[2]))
        data = bytearray(storage.get(other)[0])
    storage.delete([key]) if how == "delete" else storage.put(key, data)


@pytest.mark.parametrize("how", ["flip", "cut", "delete", "swap"])
@pytest.mark.parametrize("what", ["rank-00000.data", "manifest.json"])
def test_damage_is_noticed_and_passed_over_only_if_asked(how: str, what: str) -> None:
    storage = MemoryStorage()
    save(storage, 1, 10, 20)
    (key,) = [key for key, _ in storage.list("") if "s000000020" in key and key.endswith(what)]
    damage(storage, key, how)
    resumed = checkpointer(storage, 2)
    newest = resumed.latest()
    assert newest is not None
    assert newest.step == 20
    with pytest.raises(CorruptCheckpoint, match=what):
        resumed.load(lambda _: state(0), newest)
    assert resumed_step(storage, 2) == 10


def test_when_all_is_damaged_nothing_is_loaded() -> None:
    storage = MemoryStorage()
    save(storage, 1, 10, 20)
    for key in [key for key, _ in storage.list("") if key.endswith(".data")]:
        damage(storage, key, "flip")
    with pytest.raises(CorruptCheckpoint, match="None of the 2 kept checkpoints is whole"):
        checkpointer(storage, 2).latest(verify=True)


def test_clean_up_spares_what_a_newer_generation_is_writing() -> None:
    storage = MemoryStorage()
    save(storage, 2, 10)
    for key in ("attempts/g000003-s000000005-x/rank-00000.data", "attempts/g000002-s000000010-y/rank-00000.data"):
        storage.put(key, b"under way")
    storage.put("attempts/g000001-s000000099-z/rank-00000.data", b"abandoned")
    storage.put("attempts/of another form/x", b"not ours")
    assert checkpointer(storage, 2).clean_up(Retention(last=1)) == 1
    assert not [key for key, _ in storage.list("attempts/g000001")]
    assert resumed_step(storage, 2) == 10


@pytest.mark.parametrize(
    ("generation", "start", "dropped"),
    [(2, "a", True), (2, "other", False), (3, "a", False)],
    ids=["of this start", "of another start", "of a newer generation"],
)
def test_clean_up_drops_an_earlier_try_of_the_newest_step(generation: int, start: str, dropped: bool) -> None:
    storage = MemoryStorage()
    save(storage, 2, 10)
    tried = f"{Attempt.new(generation, 10, f'{start}-{0:016x}').prefix}rank-00000.receipt.json"
    storage.put(tried, b"")
    assert checkpointer(storage, 2).clean_up(Retention(last=1)) == dropped
    assert list(storage.list(tried)) == ([] if dropped else [(tried, 0)])
    assert resumed_step(storage, 2) == 10


class CountedCommits(tuple[Commit, ...]):
    """Counts how often it is walked."""

    walks = 0

    def __iter__(self) -> Iterator[Commit]:
        CountedCommits.walks += 1
        return super().__iter__()


def test_clean_up_and_ls_walk_the_commits_as_often_for_many_objects_as_for_few(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    walks = []
    for steps in ((10,), range(10, 100, 10)):
        storage = MemoryStorage()
        save(storage, 1, *steps)
        head = read_head(storage)
        assert head is not None
        counted = head.model_copy(update={"commits": CountedCommits(head.commits)})
        monkeypatch.setattr("spottrain.checkpoint.saving.retention.prune", lambda *_, counted=counted: counted)
        CountedCommits.walks = 0
        assert clean_up(storage, 1, Retention()) == 0
        assert _unfinished(storage, counted) == 0
        walks.append(CountedCommits.walks)
    assert walks[0] == walks[1] > 0


def test_clean_up_drops_what_a_lost_writer_has_left_of_a_commit(tmp_path: Path) -> None:
    storage = FileStorage(tmp_path)
    save(storage, 1, 10)
    head = read_head(storage)
    assert head is not None
    unfinished = tmp_path / ".unfinished"
    (unfinished / f"{head.commits[0].attempt}rank-00000.data.1".replace("/", "%")).write_bytes(b"of its first writer")
    (unfinished / "attempts%g000001-s000000020-z%rank-00000.data.2").write_bytes(b"under way")
    assert checkpointer(storage, 1).clean_up(Retention(last=1)) == 1
    assert [path.name for path in unfinished.iterdir()] == ["attempts%g000001-s000000020-z%rank-00000.data.2"]
    assert resumed_step(storage, 1) == 10


def test_a_checkpoint_of_another_engine_is_refused_and_changes_nothing() -> None:
    storage = MemoryStorage()
    save(storage, 1, 10)
    resumed = checkpointer(storage, 2)
    newest = resumed.latest()
    assert newest is not None
    zero: dict[str, Any] = {"zero": {"w": torch.ones(3, 2)}}
    with pytest.raises(CheckpointMismatch, match="step 10 has no 'zero': a different strategy or an older script"):
        resumed.load(lambda _: zero, newest)
    doubled: dict[str, Any] = {"model": {"w": torch.ones(3, 2, dtype=torch.float64)}, "step": 0}
    with pytest.raises(CheckpointMismatch, match=r"'model\.w' is float32 \[3, 2\] in the checkpoint and float64"):
        resumed.load(lambda _: doubled, newest)
    assert torch.equal(zero["zero"]["w"], torch.ones(3, 2))
    assert torch.equal(doubled["model"]["w"], torch.ones(3, 2, dtype=torch.float64))
    assert resumed_step(storage, 2) == 10


def test_milestones_are_kept() -> None:
    storage = MemoryStorage()
    save(storage, 1, 10, 15, 20, 25, 30)
    checkpointer(storage, 1).clean_up(Retention(last=1, every=20))
    head = read_head(storage)
    assert head is not None
    assert [kept.step for kept in head.commits] == [30, 20]


def test_a_milestone_is_kept_also_where_no_commit_falls_on_its_step() -> None:
    storage = MemoryStorage()
    for step in range(7, 100, 7):  # as an interval in seconds has it
        save(storage, 1, step)
        checkpointer(storage, 1).clean_up(Retention(last=1, every=20))
    head = read_head(storage)
    assert head is not None
    assert [kept.step for kept in head.commits] == [98, 84, 63, 42, 21]


class Evil:
    """A pickle that leaves a file behind when it is loaded."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def __reduce__(self) -> tuple[Any, ...]:
        return (open, (str(self._path), "w"))


def pickles(path: Path) -> list[bytes]:
    """The ways in which a pickle is written.

    They are: by hand, by torch in both its formats, and behind what looks like JSON.
    """
    legacy, zipped = io.BytesIO(), io.BytesIO()
    torch.save(Evil(path), legacy, _use_new_zipfile_serialization=False)
    torch.save({"model": Evil(path)}, zipped)
    plain = [pickle.dumps(Evil(path), protocol=protocol) for protocol in range(pickle.HIGHEST_PROTOCOL + 1)]
    return [*plain, b'{"format_version": 1}' + plain[2], legacy.getvalue(), zipped.getvalue()]


def test_pickles_planted_anywhere_in_the_store_are_never_run(tmp_path: Path) -> None:
    """A pickle stands in the place of each object and beside them.

    Those beside them have the names that torch and DeepSpeed read pickles from.
    """
    uri, executed = f"file://{tmp_path}/store", tmp_path / "executed"
    storage = open_storage(uri)
    save(storage, 1, 10)
    objects = {key: storage.get(key)[0] for key, _ in storage.list("")}
    attempt = next(iter(objects.keys() - {"HEAD"})).rpartition("/")[0]
    foreign = [
        "latest",
        "checkpoint.pt",
        *(f"{attempt}/{name}" for name in ("metadata", "__0_0.distcp", "model.bin")),
    ]
    planted = 0
    for key in (*objects, *foreign):
        for evil in pickles(executed):
            storage.put(key, evil)
            planted += 1
            for command in ("ls", "show", "verify"):
                CliRunner().invoke(checkpoints, [command, uri])
            CliRunner().invoke(checkpoints, ["export", uri, str(tmp_path / "out.safetensors")])
            with contextlib.suppress(CheckpointError):
                resumed_step(storage, 2)
        if key in objects:
            storage.put(key, objects[key])
    assert planted >= 50
    assert resumed_step(storage, 3) == 10
    checkpointer(storage, 3).clean_up(Retention())
    assert resumed_step(storage, 4) == 10
    assert not executed.exists()
    pickle.loads(pickles(executed)[0]).close()  # and they do work
    assert executed.exists()
