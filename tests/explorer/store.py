"""The store as a value, with the real commit protocol run against it.

The protocol runs operation by operation.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Iterator
from datetime import UTC, datetime
from functools import lru_cache
from typing import Any, NamedTuple

from explorer.replay import Position, Raised, Request, Script, run
from rank_parts import staged_part
from spottrain.checkpoint.errors import ObjectNotFound, PreconditionFailed
from spottrain.checkpoint.format.attempt import Attempt
from spottrain.checkpoint.format.commits import Commit, Head
from spottrain.checkpoint.format.head import HEAD_KEY, fence
from spottrain.checkpoint.format.manifest import DataFile, block_checksums, data_key
from spottrain.checkpoint.saving.committer import Committer
from spottrain.checkpoint.saving.parts import StagedPart
from spottrain.checkpoint.saving.pieces import StagedPieces
from spottrain.checkpoint.saving.retention import Retention, clean_up
from spottrain.checkpoint.saving.save_handle import SaveHandle
from spottrain.checkpoint.saving.save_task import SaveTask
from spottrain.checkpoint.saving.staging import Staged
from spottrain.checkpoint.saving.upload import Upload
from spottrain.checkpoint.stores.storage import Buffer, Pieces, whole

Objects = tuple[tuple[str, bytes], ...]
"""All objects in order of key. An etag is the hash of the content, as S3's are."""
RETENTION = Retention(last=1)
SHARD = b"shard"
NOW = datetime(2026, 1, 1, tzinfo=UTC)


class Committed(NamedTuple):
    """A commit, as far as the world looks at it."""

    generation: int
    step: int
    manifest: str


class AskedStorage:
    """Implements CheckpointStorage by asking for each operation."""

    parallel_reads = 1

    def __init__(self, script: Script) -> None:
        self._ask = script.ask

    def put(self, key: str, data: Buffer, *, if_match: str | None = None, if_absent: bool = False) -> str:
        answer: str = self._ask("put", key, bytes(data), if_match, if_absent)
        return answer

    def upload(self, key: str, data: Buffer | Pieces) -> None:
        self._ask("put", key, bytes(whole(data)), None, False)

    def get(self, key: str) -> tuple[bytes, str]:
        answer: tuple[bytes, str] = self._ask("get", key)
        return answer

    def read_into(self, key: str, offset: int, memory: memoryview) -> int:
        found = self.get(key)[0][offset : offset + len(memory)]
        memory[: len(found)] = found
        return len(found)

    def list(self, prefix: str) -> Iterator[tuple[str, int]]:
        return iter(self._ask("list", prefix))

    def delete(self, keys: Iterable[str]) -> None:
        self._ask("delete", tuple(keys))

    def keeps_deleted(self, key: str) -> str | None:
        return None

    def abandon_uploads(self, prefix: str, is_over: Callable[[str], bool]) -> int:
        return 0


def perform(objects: Objects, request: Request) -> tuple[Any, Objects]:
    """One operation: its answer, and the objects after it."""
    match request:
        case ("get", key):
            found = dict(objects).get(key)
            return (Raised(ObjectNotFound, (key,)) if found is None else (found, _etag(found))), objects
        case ("list", prefix):
            return tuple((key, len(data)) for key, data in objects if key.startswith(prefix)), objects
        case ("delete", keys):
            return None, tuple(each for each in objects if each[0] not in keys)
        case ("put", key, data, if_match, if_absent):
            found = dict(objects).get(key)
            lost = (if_absent and found is not None) or (if_match and (found is None or _etag(found) != if_match))
            if lost:
                return Raised(PreconditionFailed, (key,)), objects
            return _etag(data), tuple(sorted({**dict(objects), key: data}.items()))
    raise ValueError(request)


def _etag(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()[:12]


@lru_cache(maxsize=4096)
def _head_of(data: bytes) -> Head:
    return Head.parse(data)


def head_of(objects: Objects) -> Head | None:
    """What HEAD says."""
    data = dict(objects).get(HEAD_KEY)
    return None if data is None else _head_of(data)


def newest_of(head: Head | None) -> Committed | None:
    newest = head.newest if head is not None else None
    return None if newest is None else _committed(newest)


def _committed(commit: Commit) -> Committed:
    return Committed(commit.generation, commit.step, commit.manifest)


def is_whole(objects: Objects, commit: Commit, world_size: int) -> bool:
    """Whether the store holds everything of a commit."""
    keys = {key for key, _ in objects}
    return {commit.manifest, *(data_key(commit.attempt, rank) for rank in range(world_size))} <= keys


# --- programs ------------------------------------------------------------------------------------------------


class Fence(NamedTuple):
    """Rank 0 of a generation that starts.

    It raises the fence, and returns the newest commit.
    """

    generation: int

    def __call__(self, script: Script) -> Committed | None:
        return newest_of(fence(AskedStorage(script), self.generation))


class CleanUp(NamedTuple):
    """Rank 0 after a commit in the background."""

    generation: int

    def __call__(self, script: Script) -> int:
        return clean_up(AskedStorage(script), self.generation, RETENTION)


class _AskedHandle(SaveHandle):
    """A pause of rank 0, which waits for receipts, is a question, too."""

    def __init__(self, step: int, script: Script) -> None:
        super().__init__(step, len(SHARD), 0.0)
        self._ask = script.ask

    def pause(self, seconds: float) -> None:
        self._ask("pause")


class _AskedUpload(Upload):
    """Uploads without a thread for the checksums."""

    def __init__(self, storage: AskedStorage, rank: int) -> None:
        super().__init__(storage, None, rank=rank)
        self._asked = storage

    def write(self, staged: Staged | StagedPieces, key: str) -> DataFile:
        data = staged.content(0, len(staged))
        self._asked.upload(key, data)
        return DataFile(size=len(data), crc32=block_checksums(data))


@lru_cache
def _part(rank: int, world_size: int) -> StagedPart:
    return staged_part(SHARD, rank=rank, world_size=world_size)


class Save(NamedTuple):
    """One rank's part of a save: upload and receipt, and on rank 0 the commit."""

    generation: int
    step: int
    unique: str
    rank: int
    world_size: int
    resumed_from: int | None

    def __call__(self, script: Script) -> Committed | None:
        storage, handle = AskedStorage(script), _AskedHandle(self.step, script)
        committer = Committer(storage, self.generation, None, now=lambda: NOW)
        committer.resumed_from_step = self.resumed_from
        SaveTask(
            attempt=Attempt.new(self.generation, self.step, self.unique),
            handle=handle,
            part=_part(self.rank, self.world_size),
            upload=_AskedUpload(storage, self.rank),
            committer=committer if self.rank == 0 else None,
            receipts_timeout_seconds=1e9,
        ).run()
        if handle.error is not None:
            raise handle.error
        return None if handle.commit is None else _committed(handle.commit)


Program = Fence | CleanUp | Save


class Task(NamedTuple):
    """A program under way on one rank, with its answers so far."""

    program: Program
    log: tuple[Any, ...]
    at: Position

    @classmethod
    def of(cls, program: Program) -> Task:
        return cls(program, (), _stand(program, ()))

    @property
    def over(self) -> bool:
        return self.at.request is None

    def answered(self, answer: Any) -> Task:
        log = (*self.log, answer)
        return Task(self.program, log, _stand(self.program, log))


@lru_cache(maxsize=100_000)
def _stand(program: Program, log: tuple[Any, ...]) -> Position:
    return run(program.__call__, log)


def is_visible(request: Request) -> bool:
    """Whether the order of an operation among those of other processes may matter.

    Nobody else writes below an attempt's prefix or reads there, except rank 0, which lists receipts, and clean-up.
    """
    return _polls(request) or request[1] == HEAD_KEY


def _polls(request: Request | None) -> bool:
    return request is not None and request[0] in ("list", "pause")


def new_objects(task: Task, objects: Objects) -> bool:
    """Whether the listing that the program has read last is out of date."""
    [*_, last] = (answer for answer in task.log if isinstance(answer, tuple) and not isinstance(answer[0], bytes))
    prefix = last[0][0].rpartition("/")[0]
    return bool(perform(objects, ("list", prefix))[0] != last)


@lru_cache(maxsize=200_000)
def advance(task: Task, objects: Objects) -> tuple[Task, Objects]:
    """Perform the operations up to and including the next visible one.

    Only the first operation may look for something new.
    """
    while task.at.request is not None:
        request = task.at.request
        answer, objects = perform(objects, request)
        task = task.answered(answer)
        if is_visible(request) or _polls(task.at.request):
            break
    return task, objects
