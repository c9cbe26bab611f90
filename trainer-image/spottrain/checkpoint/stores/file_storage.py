"""A store in a folder: a local disk or a shared filesystem.

A shared filesystem has to honour POSIX rename and flock (NFSv4 does).
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import hashlib
import io
import os
import stat
import uuid
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path, PurePosixPath

from spottrain.checkpoint.errors import (
    ObjectNotFound,
    PreconditionFailed,
    StorageDenied,
    StorageError,
    StorageFull,
    StorageMissing,
    StorageUnavailable,
    StoreUnfit,
)
from spottrain.checkpoint.stores.storage import Buffer, Pieces, pieces_of

_UNFINISHED = ".unfinished"
_LOCK = ".lock"
_FULL = {errno.ENOSPC, errno.EDQUOT}
_DENIED = {errno.EACCES, errno.EPERM, errno.EROFS, errno.ENAMETOOLONG}
_MISSING = {errno.ENOENT, errno.ENOTDIR}
_NO_FOLDER = {errno.EEXIST, errno.ENOTDIR}
# What file systems answer that have no such call (CIFS and FUSE for the fsync of a folder, for example).
_NOT_OFFERED = {errno.EINVAL, errno.ENOTSUP, errno.ENOSYS}


class FileStorage:
    """Implements CheckpointStorage in a folder.

    A write goes to a temporary file, is synced, and is renamed into place. Names that start with a dot belong to the
    store (the lock and unfinished writes) and are never listed. The store creates them with its first write, so that
    it can read a folder that nobody may write to.
    """

    # Copies from the page cache keep a processor busy. torchrun says how many ranks share the processors.
    parallel_reads = max(1, min(8, (os.cpu_count() or 1) // int(os.environ.get("LOCAL_WORLD_SIZE", "1"))))

    def __init__(self, root: str | Path, *, create: bool = True) -> None:
        self._root = Path(root)
        with self._sentences("create the folder" if create else "read or write"):
            if create:
                self._root.mkdir(parents=True, exist_ok=True)
            os.scandir(self._root).close()  # raises unless it is a folder

    def put(self, key: str, data: Buffer, *, if_match: str | None = None, if_absent: bool = False) -> str:
        conditional = if_match is not None or if_absent
        with self._sentences(f"write {key}"), self._locked() if conditional else contextlib.nullcontext():
            if conditional and self._etag(key) != if_match:
                raise PreconditionFailed(key)
            self._write(key, data)
        return _etag_of(data)

    def upload(self, key: str, data: Buffer | Pieces) -> None:
        with self._sentences(f"write {key}"):
            self._write(key, data)

    def get(self, key: str) -> tuple[bytes, str]:
        with self._sentences(f"read {key}"), self._existing(key):
            data = self._path(key).read_bytes()
        return data, _etag_of(data)

    def read_into(self, key: str, offset: int, memory: memoryview) -> int:
        with self._sentences(f"read {key}"), self._existing(key), self._path(key).open("rb", buffering=0) as file:
            file.seek(offset)
            return _read_fully(memory, file)

    def list(self, prefix: str) -> Iterator[tuple[str, int]]:
        folder = prefix.rpartition("/")[0]
        with self._sentences(f"list {prefix}"):
            found = sorted(self._walk(self._root / folder))
            if not found:
                self._root.stat()  # for os.walk, an empty folder and a missing one are the same
        return (item for item in found if item[0].startswith(prefix))

    def delete(self, keys: Iterable[str]) -> None:
        for key in keys:
            path = self._path(key)
            with self._sentences(f"delete {key}"):
                path.unlink(missing_ok=True)
            self._remove_empty_folders(path.parent)

    def keeps_deleted(self, key: str) -> str | None:
        return None

    def abandon_uploads(self, prefix: str, is_over: Callable[[str], bool]) -> int:
        left = []
        with self._sentences(f"clean up {prefix}"):
            for path in (self._root / _UNFINISHED).glob("*"):
                key = path.stem.replace("%", "/")
                if key.startswith(prefix) and is_over(key):
                    left.append(path)
            for path in left:
                path.unlink(missing_ok=True)
        return len(left)

    def _write(self, key: str, data: Buffer | Pieces) -> None:
        path = self._path(key)
        unfinished = self._root / _UNFINISHED / f"{key.replace('/', '%')}.{uuid.uuid4().hex}"
        unfinished.parent.mkdir(exist_ok=True)
        try:
            with unfinished.open("wb") as file:
                for piece in pieces_of(data):
                    file.write(piece)
                file.flush()
                os.fsync(file.fileno())
            self._rename(unfinished, path)
        except BaseException:
            unfinished.unlink(missing_ok=True)
            raise

    def _rename(self, unfinished: Path, path: Path) -> None:
        folders = path.relative_to(self._root).parents
        for _ in range(10):
            # A delete that empties a folder may remove it between two calls.
            with contextlib.suppress(FileNotFoundError):
                # Not the root: if that is gone, so is what was mounted there.
                for folder in list(folders)[-2::-1]:
                    (self._root / folder).mkdir(exist_ok=True)
                unfinished.replace(path)
                _sync_folders(path.parent, self._root)
                return
        raise OSError(errno.ENOENT, "a different process removes the folder again and again")

    def _etag(self, key: str) -> str | None:
        try:
            return self.get(key)[1]
        except ObjectNotFound:
            return None

    def _path(self, key: str) -> Path:
        parts = PurePosixPath(key).parts
        if not parts or key.startswith("/") or any(part.startswith(".") for part in parts):
            raise StorageDenied(f"{key!r} is not a key of a checkpoint store.")
        return self._root.joinpath(*parts)

    def _walk(self, folder: Path) -> Iterator[tuple[str, int]]:
        for parent, folders, files in os.walk(folder):
            folders[:] = [name for name in folders if not name.startswith(".")]
            for name in files:
                path = Path(parent, name)
                # A different process may delete what was just listed.
                with contextlib.suppress(FileNotFoundError):
                    if not name.startswith("."):
                        yield path.relative_to(self._root).as_posix(), path.stat().st_size

    def _remove_empty_folders(self, folder: Path) -> None:
        with contextlib.suppress(OSError):
            while folder != self._root:
                folder.rmdir()
                folder = folder.parent

    @contextlib.contextmanager
    def _locked(self) -> Iterator[None]:
        with (self._root / _LOCK).open("a") as lock:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX)
            except OSError as error:
                if error.errno in {*_NOT_OFFERED, errno.ENOLCK}:
                    raise self._without_locks(error) from error
                raise
            try:
                yield
            finally:
                # Closing is not enough: a process that was forked meanwhile, such as a data worker, holds it open.
                fcntl.flock(lock, fcntl.LOCK_UN)

    @contextlib.contextmanager
    def _existing(self, key: str) -> Iterator[None]:
        try:
            yield
        except (FileNotFoundError, IsADirectoryError, NotADirectoryError) as error:
            raise ObjectNotFound(key) from error

    @contextlib.contextmanager
    def _sentences(self, doing: str) -> Iterator[None]:
        try:
            yield
        except StorageError:
            raise
        except OSError as error:
            raise self._sentence(doing, error) from error

    def _without_locks(self, error: OSError) -> StoreUnfit:
        return StoreUnfit(
            f"The file system of the checkpoint folder {self._root} refuses flock ({error.strerror}), by which two "
            "generations never commit at once. Mount it with locks (NFS without `nolock`, CIFS without `nobrl`), or "
            "use a different volume or a bucket for checkpoint.uri in a new job."
        )

    def _sentence(self, doing: str, error: OSError) -> StorageError:
        where = f"Could not {doing} in the checkpoint folder {self._root}"
        if error.errno in _NO_FOLDER:
            error = _cause(error, self._root)
        if error.errno in _FULL:
            return StorageFull(f"{where}: the disk is full. Free space, or lower checkpoint.keep.")
        if error.errno in _DENIED:
            return StorageDenied(f"{where}: {error.strerror}. Let the job's user write to it.")
        if error.errno in _NO_FOLDER:
            return StorageDenied(f"{where}: a part of its path is a file. Correct checkpoint.uri in a new job.")
        if _is_gone(self._root):
            return StorageMissing(
                f"{where}: it is gone. Mount or create it again, or correct checkpoint.uri in a new job."
            )
        return StorageUnavailable(f"{where}: {error.strerror or error}.")


def _cause(error: OSError, folder: Path) -> OSError:
    """What is wrong with a folder that exists, but seems to be none."""
    try:
        folder.stat()
    except OSError as found:
        return error if found.errno in _MISSING else found
    return error


def _is_gone(folder: Path) -> bool:
    """Whether there is no such folder. If a mount is broken, nobody knows."""
    try:
        return not stat.S_ISDIR(folder.stat().st_mode)
    except OSError as error:
        return error.errno in _MISSING


def _read_fully(memory: memoryview, file: io.FileIO) -> int:
    """Fill `memory` from a file. One read returns 2 GiB at most."""
    filled = 0
    while filled < len(memory) and (length := file.readinto(memory[filled:])):
        filled += length
    return filled


def _etag_of(data: Buffer) -> str:
    return hashlib.sha256(data).hexdigest()


def _sync_folders(folder: Path, root: Path) -> None:
    """Make the rename durable, and the folders that were created for it.

    A file system that refuses to sync folders orders renames by itself, or can't do better.
    """
    while True:
        descriptor = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        except OSError as error:
            if error.errno not in _NOT_OFFERED:
                raise
        finally:
            os.close(descriptor)
        if folder == root:
            return
        folder = folder.parent
