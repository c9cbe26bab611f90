"""A bounded folder of shards on a node, which its ranks and their workers share.

A file there is a whole shard, verified: it is fetched under another name, unpacked if it is packed, and renamed.
Whoever needs a shard that is not there fetches it, so that no process has to live for another one. If room is needed,
shards go that the plan does not name, and then those that it names last: the plan is the order in which the node's
ranks need shards, which is known. Locks are those of the kernel, which end with their process.
"""

from __future__ import annotations

import fcntl
import json
import os
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

import numpy as np

from spottrain.checkpoint.stores.storage import ObjectReader
from spottrain.data.shards.fetched_bytes import FetchedBytes
from spottrain.data.shards.formats import InvalidShard, ShardFormat
from spottrain.data.shards.formats.shard_format import Unpack
from spottrain.data.shards.index import UNKNOWN, ShardIndex
from spottrain.data.shards.read_shard import read_shard
from spottrain.data.shards.store import ShardDamaged, again_if_damaged

_NUM_LOCKS = 64
_WAIT_FOR_ROOM = 0.05
_PLAN = "plan.json"


class CacheUnusable(ValueError):
    """A cache that can't hold the shards. The message is a sentence."""


class ShardCache:
    """The shards of an index on this node.

    Attributes:
        folder: Has the shards, and what else is known of the index on this node.
        max_bytes: Largest size of all shards there.
        fetched: Counts the bytes that were fetched.
    """

    def __init__(
        self,
        folder: Path,
        max_bytes: int,
        index: ShardIndex,
        format: ShardFormat,
        open_store: Callable[[], ObjectReader],
        *,
        place: str,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        """Make the folder.

        Args:
            folder: On a local disk.
            max_bytes: Largest size of all files there, also of those that are being fetched.
            index: The shards.
            format: Gives them the form in which samples are read.
            open_store: Opens the store; called once in each process that fetches.
            place: URI of the shards, for messages.
            sleep: Waits so many seconds.

        Raises:
            CacheUnusable: The folder can't be written, or a shard is larger than the cache.
        """
        if ":/" in str(folder):
            raise CacheUnusable(f"the cache {folder} is not a folder of this node; name one on a local disk")
        self.folder = folder / index.fingerprint
        self._folder = str(self.folder)
        self.max_bytes = max_bytes
        self.fetched = FetchedBytes(self.folder / "fetched")
        self._index = index
        self._format = format
        self._open_store = open_store
        self._place = place
        self._sleep = sleep
        self._store: tuple[int, ObjectReader] | None = None  # with the process that has opened it
        is_packed = np.array([format.unpack(name) is not None for name in index.names])
        room = index.unpacked + np.where(is_packed, index.sizes, 0)
        if (largest := int(room.max())) > max_bytes:
            raise CacheUnusable(
                f"the shard {index.names[int(room.argmax())]} needs {largest} bytes, and the cache {folder} holds "
                f"{max_bytes}; raise cache_bytes"
            )
        try:
            (self.folder / "locks").mkdir(parents=True, exist_ok=True)
            with self._locked("room"):
                self._forget_other_boots()
        except OSError as error:
            raise CacheUnusable(
                f"the cache {folder} can't be written: {error.strerror}; name a folder on a local disk to which the "
                "trainer may write, with room for cache_bytes"
            ) from error

    def open(self, number: int) -> int:
        """Open a shard, and return its descriptor. Close it soon: it takes room, also if the shard is dropped.

        Raises as `fetch`.
        """
        while True:
            try:
                return os.open(self._file(number), os.O_RDONLY | os.O_CLOEXEC)
            except FileNotFoundError:
                self.fetch(number)
            except OSError as error:
                raise CacheUnusable(
                    f"the shard {self._index.names[number]} in the cache {self.folder} can't be read: "
                    f"{error.strerror}; give the trainer the right to read there, or name another folder"
                ) from error

    def holds(self, number: int) -> bool:
        return self._path(number).exists()

    def fetch(self, number: int, *, ahead: bool = False) -> None:
        """Have a shard here.

        If the store does not answer, whoever needs the shard waits for five minutes. Fetching `ahead` does not: its
        lock would add to that time.

        Raises:
            ShardDamaged: It is not what the index says.
            CacheUnusable: The disk is full, or can't be written.
            StorageError: It can't be read.
        """
        with self.writing(), self._locked(f"shard-{number % _NUM_LOCKS}"):
            if self.holds(number):
                return
            unpack = self._format.unpack(self._index.names[number])
            with self._room_for(number, is_packed=unpack is not None) as unfinished:
                again_if_damaged(lambda: self._fill(number, unpack, unfinished, ahead), sleep=self._sleep)
                os.rename(unfinished[-1], self._path(number))
                self.fetched.add(int(self._index.sizes[number]), late=not ahead)

    def _forget_other_boots(self) -> None:
        """Drop shards from before a restart of the node. After a crash, not all of their bytes are on the disk."""
        noted, boot = self.folder / "boot", _boot()
        if not noted.exists() or noted.read_bytes() != boot:
            for path in self.folder.glob("*.shard"):
                path.unlink(missing_ok=True)
            noted.write_bytes(boot)

    def plan(self, upcoming: Sequence[int]) -> None:
        """Say which shards are needed, in order of need. Raises CacheUnusable, as `fetch` does."""
        file = self.folder / f"{_PLAN}.{os.getpid()}"
        with self.writing():
            file.write_text(json.dumps(list(upcoming)))
            file.rename(self.folder / _PLAN)

    def _path(self, number: int) -> Path:
        return Path(self._file(number))

    def _file(self, number: int) -> str:
        return f"{self._folder}/{number}.shard"

    @contextmanager
    def writing(self) -> Iterator[None]:
        """Raise CacheUnusable for an error of the disk."""
        try:
            yield
        except OSError as error:
            raise CacheUnusable(
                f"the cache {self.folder} can't be written: {error.strerror}; give its disk more room than "
                f"cache_bytes ({self.max_bytes}), and the trainer the right to write there"
            ) from error

    @contextmanager
    def _locked(self, name: str) -> Iterator[None]:
        with (self.folder / "locks" / name).open("w") as file:
            fcntl.flock(file, fcntl.LOCK_EX)
            yield

    @contextmanager
    def _room_for(self, number: int, *, is_packed: bool) -> Iterator[list[Path]]:
        """A file of the shard's size, and one of its unpacked size if it is packed.

        They count already, and are locked as long as their process lives. Those that are not renamed go afterwards.
        """
        sizes = [int(self._index.sizes[number]), int(self._index.unpacked[number])][: 1 + is_packed]
        paths = [self.folder / f"{number}.{os.getpid()}.{place}.unfinished" for place in range(len(sizes))]
        with ExitStack() as files:
            for path in paths:
                files.callback(path.unlink, missing_ok=True)
            while True:
                with self._locked("room"):
                    if self._make_room(sum(sizes)):
                        for path, size in zip(paths, sizes, strict=True):
                            file = files.enter_context(path.open("wb"))
                            fcntl.flock(file, fcntl.LOCK_EX)
                            if size:  # taken now: a full disk ends a process that writes to mapped memory
                                os.posix_fallocate(file.fileno(), 0, size)
                        break
                self._sleep(_WAIT_FOR_ROOM)  # others are fetching; what they have fetched may go
            yield paths

    def _make_room(self, size: int) -> bool:
        """Drop shards until there is room, first those that are needed last."""
        for path in self.folder.glob("*.unfinished"):
            if _is_left(path):
                path.unlink(missing_ok=True)
        unfinished = _found(self.folder.glob("*.unfinished"))  # first: one that is finished meanwhile counts below
        shards = _found(self.folder.glob("*.shard"))
        used = sum(each.st_size for each in (*unfinished.values(), *shards.values()))
        needed = {number: place for place, number in enumerate(self._planned())}
        # What the plan does not name goes first, and of that what has been here for longest.
        last = sorted(shards, key=lambda path: (needed.get(int(path.stem), len(needed)), -shards[path].st_mtime))
        while used + size > self.max_bytes and last:
            path = last.pop()
            used -= shards[path].st_size
            path.unlink(missing_ok=True)
        return used + size <= self.max_bytes

    def _planned(self) -> list[int]:
        with suppress(OSError, ValueError):
            found: list[int] = json.loads((self.folder / _PLAN).read_text())
            return found
        return []

    def _fill(self, number: int, unpack: Unpack | None, unfinished: Sequence[Path], ahead: bool) -> None:
        self._read(number, unfinished[0], is_patient=not ahead)
        if unpack is not None:
            self._unpack(number, unpack, *unfinished)
        if self._index.checksums[number] == UNKNOWN:
            self._check(number, unfinished[-1])

    def _read(self, number: int, path: Path, *, is_patient: bool) -> None:
        """Read a shard into a file of its size, and verify it."""
        with path.open("r+b") as file:
            read_shard(
                self._opened_store,
                self._index.names[number],
                int(self._index.sizes[number]),
                file,
                place=self._place,
                checksum=int(self._index.checksums[number]),
                is_patient=is_patient,
                sleep=self._sleep,
            )

    def _unpack(self, number: int, unpack: Unpack, packed: Path, unpacked: Path) -> None:
        with packed.open("rb") as file, unpacked.open("r+b") as into, self._of_the_format(number):
            unpack(file, into)
            into.truncate()

    def _check(self, number: int, path: Path) -> None:
        """Check the table of samples of a shard whose checksum nobody knows."""
        with path.open("rb") as file, self._of_the_format(number):
            found, said = len(self._format.places(file)), int(self._index.samples[number])
            if found != said:
                raise InvalidShard(f"it has {found} samples, and the index says {said}")

    @contextmanager
    def _of_the_format(self, number: int) -> Iterator[None]:
        try:
            yield
        except InvalidShard as error:
            raise ShardDamaged(
                f"the shard {self._index.names[number]} of {self._place} can't be used: {error}; put it back, or "
                "make the index again (`spottrain data index`), which begins another run"
            ) from error

    def _opened_store(self) -> ObjectReader:
        """A client of this process: those of a parent don't survive a fork."""
        if self._store is None or self._store[0] != os.getpid():
            self._store = os.getpid(), self._open_store()
        return self._store[1]


def _boot() -> bytes:
    """What tells this start of the node from those before; empty if nothing does."""
    with suppress(OSError):
        return Path("/proc/sys/kernel/random/boot_id").read_bytes()
    return b""


def _found(paths: Iterable[Path]) -> dict[Path, os.stat_result]:
    """What files are, without those that are gone: others finish what they fetch."""
    found = {}
    for path in paths:
        with suppress(FileNotFoundError):
            found[path] = path.stat()
    return found


def _is_left(path: Path) -> bool:
    """Whether the process that was fetching a file is gone."""
    with suppress(FileNotFoundError), path.open("rb") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
    return True
