"""A store in a folder, beside the contract of all stores: durable writes, locks, and folders that are gone."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import resource
import signal
from collections.abc import Callable
from pathlib import Path

import pytest

from spottrain.checkpoint.errors import (
    StorageDenied,
    StorageMissing,
    StorageUnavailable,
    StoreUnfit,
)
from spottrain.checkpoint.store_trial import try_store
from spottrain.checkpoint.stores.file_storage import FileStorage
from spottrain.checkpoint.stores.uri import open_storage


def test_a_folder_abandons_what_a_killed_writer_left(tmp_path: Path) -> None:
    storage = FileStorage(tmp_path)
    assert storage.abandon_uploads("", lambda key: True) == 0
    (tmp_path / ".unfinished").mkdir()
    for name in ("attempts%old.123", "attempts%new.456"):
        (tmp_path / ".unfinished" / name).write_bytes(b"half")
    assert list(storage.list("")) == []
    assert storage.abandon_uploads("attempts/", lambda key: key == "attempts/old") == 1
    assert [path.name for path in (tmp_path / ".unfinished").iterdir()] == ["attempts%new.456"]


@pytest.mark.parametrize("write", [FileStorage.upload, FileStorage.put])
@pytest.mark.parametrize("is_killed", [True, False], ids=["killed", "fails"])
def test_a_writer_that_ends_within_a_write_leaves_the_old_object(
    is_killed: bool, write: Callable[[FileStorage, str, bytes], object], tmp_path: Path
) -> None:
    storage = FileStorage(tmp_path)
    storage.put("a/b", b"old")
    writer = os.fork()
    if writer == 0:
        try:
            # The kernel lets it write no more than half.
            resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
            resource.setrlimit(resource.RLIMIT_FSIZE, (500, 500))
            signal.signal(signal.SIGXFSZ, signal.SIG_DFL if is_killed else signal.SIG_IGN)
            with contextlib.suppress(StorageUnavailable):
                write(storage, "a/b", bytes(1000))
        finally:
            os._exit(1)
    assert os.WIFSIGNALED(os.waitpid(writer, 0)[1]) == is_killed
    assert storage.get("a/b")[0] == b"old"
    assert storage.abandon_uploads("", lambda key: True) == is_killed


def test_a_folder_makes_a_write_durable_before_it_is_seen(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The data is synced before readers see the object, and its folders after that.

    At each fsync, the test notes what is synced and whether readers see the object yet.
    """
    synced: list[tuple[Path | int, bool]] = []

    def fsync(descriptor: int) -> None:
        path = Path(os.readlink(f"/proc/self/fd/{descriptor}"))
        synced.append((path if path.is_dir() else path.stat().st_size, (tmp_path / "a" / "b").exists()))

    monkeypatch.setattr(os, "fsync", fsync)
    FileStorage(tmp_path).upload("a/b", bytes(1000))
    assert synced == [(1000, False), (tmp_path / "a", True), (tmp_path, True)]


@pytest.mark.timeout(30)
def test_a_process_that_is_forked_within_a_write_keeps_nobody_from_the_next(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As a data worker is, while the rank commits in the background."""
    forked: list[int] = []

    def fsync(descriptor: int) -> None:
        if forked:
            return
        forked.append(os.fork())
        if forked == [0]:
            signal.pause()

    monkeypatch.setattr(os, "fsync", fsync)
    try:
        etag = FileStorage(tmp_path).put("HEAD", b"1", if_absent=True)
        assert forked
        FileStorage(tmp_path).put("HEAD", b"2", if_match=etag)
    finally:
        os.kill(forked[0], signal.SIGKILL)
        os.waitpid(forked[0], 0)
    assert FileStorage(tmp_path).get("HEAD")[0] == b"2"


def test_a_folder_that_is_a_file_gets_a_sentence(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    for folder in ("file", "file/store"):
        with pytest.raises(StorageDenied, match=r"checkpoint folder .*: a part of its path is a file"):
            open_storage(f"file://{tmp_path}/{folder}")


@pytest.mark.parametrize("key", ["", "/etc/passwd", "../up", "a/../../b", ".lock"])
def test_a_folder_refuses_keys_outside_of_it(tmp_path: Path, key: str) -> None:
    with pytest.raises(StorageDenied, match="is not a key"):
        FileStorage(tmp_path).put(key, b"")


def test_a_folder_that_is_gone_differs_from_an_empty_one(tmp_path: Path) -> None:
    storage = open_storage(f"file://{tmp_path}/store")
    assert list(storage.list("a/")) == []
    (tmp_path / "store").rename(tmp_path / "gone")
    with pytest.raises(StorageMissing, match="it is gone"):
        list(storage.list("a/"))


@pytest.mark.parametrize("broken", [errno.ENOTCONN, errno.ESTALE, errno.EIO], ids=errno.errorcode.get)
def test_a_folder_whose_mount_is_broken_is_unavailable(
    broken: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    storage = open_storage(f"file://{tmp_path}")
    storage.put("HEAD", b"1")

    def fail(path: object, *_: object, **__: object) -> None:
        raise OSError(broken, os.strerror(broken), str(path))

    for name in ("os.stat", "os.scandir", "os.mkdir", "io.open"):
        monkeypatch.setattr(name, fail)
    for use in (
        lambda: storage.get("HEAD"),
        lambda: storage.put("HEAD", b"2"),
        lambda: list(storage.list("")),
        lambda: storage.abandon_uploads("", lambda _: True),
        lambda: open_storage(f"file://{tmp_path}"),
    ):
        with pytest.raises(StorageUnavailable, match=os.strerror(broken)):
            use()


def test_a_mount_point_whose_mount_is_broken_is_unavailable(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The folder above knows that it exists.

    To `is_dir` of Python 3.14 and later, it is no folder.
    """

    def fail(path: object, *_: object, **__: object) -> None:
        raise OSError(errno.ENOTCONN, os.strerror(errno.ENOTCONN), str(path))

    for name in ("os.stat", "os.scandir"):
        monkeypatch.setattr(name, fail)
    monkeypatch.setattr(Path, "is_dir", lambda path: os.path.isdir(path))
    with pytest.raises(StorageUnavailable, match=os.strerror(errno.ENOTCONN)):
        open_storage(f"file://{tmp_path}")


def test_a_folder_is_written_where_folders_can_not_be_synced(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """CIFS and FUSE answer so."""
    sync = os.fsync

    def fsync(descriptor: int) -> None:
        if Path(os.readlink(f"/proc/self/fd/{descriptor}")).is_dir():
            raise OSError(errno.EINVAL, os.strerror(errno.EINVAL))
        sync(descriptor)

    monkeypatch.setattr(os, "fsync", fsync)
    storage = FileStorage(tmp_path)
    storage.upload("a/b", b"1")
    assert storage.get("a/b")[0] == b"1"


@pytest.mark.parametrize("number", [errno.ENOLCK, errno.ENOSYS, errno.ENOTSUP, errno.EINVAL])
def test_a_folder_without_locks_is_refused_by_its_trial(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    def flock(file: object, operation: int) -> None:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(fcntl, "flock", flock)
    with pytest.raises(StoreUnfit, match=r"refuses flock \(.*Mount it with locks \(NFS without `nolock`"):
        list(try_store(FileStorage(tmp_path)))
