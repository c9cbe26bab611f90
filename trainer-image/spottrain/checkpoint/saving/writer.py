"""Who writes the staged bytes to the store: a process beside the rank, outside of the interpreter that trains.

It is forked while the rank has neither threads nor a CUDA context (the agent does so before the script runs), waits
at a socket, and maps the rank's staging memory by its descriptor. Receipts and commits stay the rank's: what the
process has written counts for nothing until the rank says so. It ends with its rank; a rank whose writer is lost, or
that has none, writes for itself.
"""

from __future__ import annotations

import contextlib
import ctypes
import logging
import mmap
import os
import signal
import threading
import traceback
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import cache
from multiprocessing.connection import Connection, Pipe
from multiprocessing.reduction import recv_handle, send_handle
from typing import NoReturn, Self

from spottrain.checkpoint.errors import CheckpointError, SaveFailed
from spottrain.checkpoint.format.head import read_head
from spottrain.checkpoint.format.manifest import DataFile, block_checksums
from spottrain.checkpoint.stores.storage import CheckpointStorage
from spottrain.checkpoint.stores.uri import open_storage

logger = logging.getLogger(__name__)

_PR_SET_PDEATHSIG = 1


class WriterLost(Exception):
    """The writer process has ended. The message says how."""


def write(storage: CheckpointStorage, data: memoryview, key: str) -> DataFile:
    """Upload a data file, and reckon its checksums meanwhile. Raises StorageError."""
    with ThreadPoolExecutor(1) as pool:
        checksums = pool.submit(block_checksums, data)
        if len(data):
            storage.upload(key, data)
        return DataFile(size=len(data), crc32=checksums.result())


@dataclass(frozen=True, slots=True, kw_only=True)
class _StoreSettings:
    """Which store to open, and what its client goes by in the rank, where the script may have changed it."""

    uri: str
    endpoint_url: str | None
    environment: tuple[tuple[str, str], ...]
    folder: str | None


@dataclass(frozen=True, slots=True, kw_only=True)
class _Request:
    """What to write where; the descriptor of the memory follows it. Without a key, only to get ready for that."""

    store: _StoreSettings
    key: str | None
    size: int


class WriterProcess:
    """The rank's side."""

    def __init__(self, pid: int, connection: Connection) -> None:
        self.pid = pid
        self._connection = connection
        self._store: _StoreSettings | None = None
        self._ending: str | None = None
        self._lock = threading.Lock()

    @classmethod
    def fork(cls) -> Self:
        """Only for a process that has no threads and hasn't touched CUDA. Raises OSError."""
        ours, theirs = Pipe()
        pid = os.fork()
        if pid == 0:
            _live(theirs)
        theirs.close()
        return cls(pid, ours)

    def connect(self, uri: str, endpoint_url: str | None = None) -> None:
        """Say which store to write to, as `open_storage` is told, and at the same time: what its client finds in the
        environment now is what the writer goes by. It opens the store with the first `prepare` or `write`."""
        folder = None
        with contextlib.suppress(OSError):
            folder = os.getcwd()
        self._store = _StoreSettings(
            uri=uri, endpoint_url=endpoint_url, environment=tuple(sorted(os.environ.items())), folder=folder
        )

    def write(self, key: str, descriptor: int, size: int) -> DataFile:
        """Have the first `size` bytes of the shared memory `descriptor` written.

        Raises CheckpointError, or WriterLost where the process has ended, so that nobody knows what it has done.
        """
        return self._ask(key, descriptor, size)

    def prepare(self, descriptor: int) -> None:
        """Have the store opened and the shared memory mapped ahead of the first `write`. Raises as that does."""
        self._ask(None, descriptor, 0)

    def _ask(self, key: str | None, descriptor: int, size: int) -> DataFile:
        if self._store is None:
            raise ValueError("connect the writer to a store first")
        with self._lock:
            try:
                self._connection.send(_Request(store=self._store, key=key, size=size))
                send_handle(self._connection, descriptor, self.pid)
                answer: DataFile | CheckpointError = self._connection.recv()
            except BaseException as error:
                # Whatever it was, the next answer would be the one to this request.
                ending = self.close()
                if isinstance(error, EOFError | OSError):
                    raise WriterLost(ending) from error
                raise
        if isinstance(answer, CheckpointError):
            raise answer
        return answer

    def close(self) -> str:
        """End the process, and what it is writing; returns how it has ended, as a sentence."""
        if self._ending is None:
            self._connection.close()
            self._ending = f"The process that writes checkpoints {_end(self.pid)}."
        return self._ending


def _end(pid: int) -> str:
    try:
        # Raises where it is no child any more, so that nobody else is killed who has its number by now.
        os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT)
        # Forks of the rank may hold its end of the connection, so that to close it isn't enough.
        os.kill(pid, signal.SIGKILL)
        exit_code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    except ChildProcessError:
        return "has ended"  # and the script has waited for it
    return f"was killed by signal {-exit_code}" if exit_code < 0 else f"ended with exit code {exit_code}"


_of_rank: tuple[int, WriterProcess] | None = None


def start_writer() -> None:
    """Fork the writer of the session that this process is going to open."""
    global _of_rank
    try:
        _of_rank = os.getpid(), WriterProcess.fork()
    except OSError as error:
        logger.warning("No process could be started that writes checkpoints; the rank does so itself. (%s)", error)


def started_writer() -> WriterProcess | None:
    """What this process, and not the one that it was forked from, has started by `start_writer`."""
    return _of_rank[1] if _of_rank is not None and _of_rank[0] == os.getpid() else None


def _live(connection: Connection) -> NoReturn:
    exit_code = 1
    try:
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
            signal.signal(number, signal.SIG_IGN)  # the rank knows when it is over
        # The rank's files and sockets would live on with this process, and its end of the connection for ever.
        os.closerange(3, connection.fileno())
        os.closerange(connection.fileno() + 1, os.sysconf("SC_OPEN_MAX"))
        _Server(connection).serve()
        exit_code = 0
    except BaseException:
        traceback.print_exc()
    finally:
        os._exit(exit_code)


class _Server:
    """The process's side."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection
        self._open = cache(_open)
        self._inode: int | None = None
        self._memory = memoryview(b"")

    def serve(self) -> None:
        """Until the rank has closed the connection, or ended."""
        while True:
            try:
                request: _Request = self._connection.recv()
                descriptor = recv_handle(self._connection)
            except EOFError:
                return
            self._connection.send(self._answer(request, descriptor))

    def _answer(self, request: _Request, descriptor: int) -> DataFile | CheckpointError:
        try:
            data = self._mapped(descriptor)[: request.size]
            if len(data) != request.size:
                raise ValueError(f"{request.size} bytes were to be written, and {len(data)} are there")
            storage = self._open(request.store)
            if request.key is None:
                read_head(storage)  # for the connection
                return DataFile(size=0, crc32=())
            return write(storage, data, request.key)
        except CheckpointError as error:
            return error
        except Exception as error:
            what = request.key or "The first object"
            logger.exception("%s could not be written", what)
            return SaveFailed(f"{what} of the checkpoint could not be written: {error!r}.")
        finally:
            os.close(descriptor)

    def _mapped(self, descriptor: int) -> memoryview:
        """The rank's staging memory, which is mostly the same as the last time: its pages are mapped once."""
        inode = os.fstat(descriptor).st_ino
        if inode != self._inode:
            flags = mmap.MAP_SHARED | mmap.MAP_POPULATE
            self._memory = memoryview(mmap.mmap(descriptor, 0, flags=flags, prot=mmap.PROT_READ))
            self._inode = inode
        return self._memory


def _open(store: _StoreSettings) -> CheckpointStorage:
    os.environ.clear()
    os.environ.update(store.environment)
    if store.folder is not None:
        with contextlib.suppress(OSError):
            os.chdir(store.folder)
    # The rank has opened it before.
    return open_storage(store.uri, endpoint_url=store.endpoint_url, create_folder=False)
