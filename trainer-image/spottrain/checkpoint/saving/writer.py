"""The writer: a process beside the rank that uploads the staged bytes.

It does not share the interpreter that trains. It is forked while the rank has neither threads nor a CUDA context: the
agent does so before the script runs. It waits at a socket, and maps the rank's staging memory by its descriptor.
Receipts and commits stay with the rank: what the process has written counts only once the rank says so. It ends with
its rank. A rank that has lost its writer, or has none, uploads for itself.
"""

from __future__ import annotations

import contextlib
import logging
import mmap
import os
import signal
import threading
import traceback
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import cache
from multiprocessing.connection import Connection, Pipe
from multiprocessing.reduction import recv_handle, send_handle
from typing import NoReturn, Self

from spottrain.checkpoint.errors import CheckpointError, SaveFailed
from spottrain.checkpoint.format.head import read_head
from spottrain.checkpoint.format.manifest import DataFile, block_checksums
from spottrain.checkpoint.saving.pieces import StagedPieces
from spottrain.checkpoint.stores.storage import CheckpointStorage
from spottrain.checkpoint.stores.uri import open_storage
from spottrain_runtime.processes import die_with_parent

logger = logging.getLogger(__name__)


class WriterLost(Exception):
    """The writer process has ended. The message says how."""


def write(storage: CheckpointStorage, data: memoryview | StagedPieces, key: str) -> DataFile:
    """Upload a data file, and compute its checksums meanwhile. Raises CheckpointError."""
    if isinstance(data, StagedPieces):
        checked = _Checked(data)
        storage.upload(key, checked)
        return DataFile(size=len(data), crc32=tuple(checked.checksums))
    with ThreadPoolExecutor(1) as pool:
        checksums = pool.submit(block_checksums, data)
        if len(data):
            storage.upload(key, data)
        return DataFile(size=len(data), crc32=checksums.result())


class _Checked:
    """Pieces, and the checksums of the blocks of those that were made. Implements Pieces."""

    def __init__(self, pieces: StagedPieces) -> None:
        self.piece_bytes = pieces.piece_bytes
        self.checksums: list[int] = []
        self._pieces = pieces

    def __len__(self) -> int:
        return len(self._pieces)

    def __iter__(self) -> Iterator[memoryview]:
        for piece in self._pieces:
            self.checksums += block_checksums(piece)
            yield piece


@dataclass(frozen=True, slots=True, kw_only=True)
class _StoreSettings:
    """Which store to open, and the environment of its client in the rank.

    The script may have changed that environment.
    """

    uri: str
    endpoint_url: str | None
    encryption: str | None
    environment: tuple[tuple[str, str], ...]
    folder: str | None


@dataclass(frozen=True, slots=True, kw_only=True)
class _Request:
    """Request to write the memory, whose descriptor follows. Without a key: only prepare."""

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
        """Fork the process. This one must have no threads and must not have touched CUDA. Raises OSError."""
        ours, theirs = Pipe()
        pid = os.fork()
        if pid == 0:
            _serve(theirs)
        theirs.close()
        return cls(pid, ours)

    def connect(self, uri: str, endpoint_url: str | None = None, encryption: str | None = None) -> None:
        """Set the store to write to.

        Call it together with `open_storage`, with the same arguments: the writer takes over the environment of this
        moment. It opens the store with the first `prepare` or `write`.
        """
        folder = None
        with contextlib.suppress(OSError):
            folder = os.getcwd()
        self._store = _StoreSettings(
            uri=uri,
            endpoint_url=endpoint_url,
            encryption=encryption,
            environment=tuple(sorted(os.environ.items())),
            folder=folder,
        )

    def write(self, key: str, descriptor: int, size: int) -> DataFile:
        """Write the first `size` bytes of shared memory to the store.

        Args:
            key: The object to write.
            descriptor: File descriptor of the memory.
            size: Number of bytes.

        Returns:
            Size and checksums of what was written.

        Raises:
            CheckpointError: The store refused or failed the write.
            WriterLost: The process has ended, and nobody knows what it has done.
        """
        return self._ask(key, descriptor, size)

    def prepare(self, descriptor: int) -> None:
        """Open the store and map the shared memory ahead of the first `write`. Raises the same errors."""
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
                # Whatever the error, the next answer would belong to this request.
                ending = self.close()
                if isinstance(error, EOFError | OSError):
                    raise WriterLost(ending) from error
                raise
        if isinstance(answer, CheckpointError):
            raise answer
        return answer

    def close(self) -> str:
        """End the process, with any write that is under way. Returns how it ended, as a sentence."""
        if self._ending is None:
            self._connection.close()
            self._ending = f"The process that writes checkpoints {_end(self.pid)}."
        return self._ending


def _end(pid: int) -> str:
    try:
        # Raises if it isn't a child any more: its number may belong to a different process by now.
        os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT)
        # Forks of the rank may hold its end of the connection, so that closing it isn't enough.
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
        logger.warning("The writer of checkpoints could not start; the rank writes them itself. (%s)", error)


def started_writer() -> WriterProcess | None:
    """The writer that `start_writer` started in this process.

    The writer of the process that this one was forked from does not count.
    """
    return _of_rank[1] if _of_rank is not None and _of_rank[0] == os.getpid() else None


def _serve(connection: Connection) -> NoReturn:
    exit_code = 1
    try:
        die_with_parent()
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
            signal.signal(number, signal.SIG_IGN)  # the rank decides when to end
        # Otherwise, this process would keep the rank's files and sockets open, and its end of the connection.
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
        """Answer requests until the rank has closed the connection, or ended."""
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
                raise ValueError(f"{request.size} bytes to write, but the memory holds {len(data)}")
            storage = self._open(request.store)
            if request.key is None:
                read_head(storage)  # opens the connection
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
        """The rank's staging memory. It is mostly the same as the last time, so its pages are mapped once."""
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
    # The rank has created the folder before.
    return open_storage(store.uri, endpoint_url=store.endpoint_url, encryption=store.encryption, create_folder=False)
