"""Where shards lie: in a folder of a bucket, a file system or a web server, under names of one pattern."""

from __future__ import annotations

import fnmatch
import http.client
import logging
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TypeVar

from spottrain.checkpoint.errors import (
    CorruptCheckpoint,
    ObjectNotFound,
    StorageDenied,
    StorageError,
    StorageUnavailable,
)
from spottrain.checkpoint.stores.storage import ANSWER_SECONDS, PAUSES, ObjectReader
from spottrain.data.shards.shard_storage import ShardStorage
from spottrain_runtime.wording import one_line

logger = logging.getLogger(__name__)

T = TypeVar("T")

_PAUSES_OF_DAMAGE = (1, 2)
_AGAIN = frozenset({408, 425, 429, 500, 502, 503, 504})


class ShardDamaged(CorruptCheckpoint):
    """A shard that is not what the index says. The message is a sentence."""


def through_outages(
    read: Callable[[], T],
    *,
    is_patient: bool = True,
    sleep: Callable[[float], None] = time.sleep,
    clock: Callable[[], float] = time.monotonic,
) -> T:
    """What `read` returns. While the store does not answer, it is asked again, if `is_patient`.

    Raises:
        StorageUnavailable: It has not answered for five minutes, also if each try takes its time.
        StorageError: What `read` raises otherwise.
    """
    begin, pauses = clock(), iter(PAUSES if is_patient else ())
    while True:
        try:
            return read()
        except StorageUnavailable as error:
            pause, waited = next(pauses, None), clock() - begin
            if pause is None or waited > sum(PAUSES):
                raise type(error)(
                    f"{error} It was asked again for {waited:.0f} s. Mend the store, or wait for it; a job then "
                    "continues from its newest commit."
                ) from error
            if pause == PAUSES[0]:
                logger.warning("The store of the shards is asked again for %d s: %s", sum(PAUSES), error)
            sleep(pause)


def again_if_damaged(
    read: Callable[[], T],
    *,
    damage: type[Exception] = ShardDamaged,
    sleep: Callable[[float], None] = time.sleep,
) -> T:
    """What `read` returns. What was damaged on the way here is read again, up to twice. Then it raises `damage`."""
    for pause in _PAUSES_OF_DAMAGE:
        try:
            return read()
        except damage as error:
            logger.warning("It is read again in %d s: %s", pause, error)
            sleep(pause)
    return read()


@dataclass(frozen=True, slots=True)
class ShardPlace:
    """A URI such as s3://bucket/corpus/*.tar.

    Attributes:
        folder: URI of the folder, without a slash at its end.
        pattern: Names of the shards in it, with * and ?.
        endpoint_url: Address of an S3- or GCS-compatible server, or of Azure's storage account. None: the cloud's
            own.
    """

    folder: str
    pattern: str
    endpoint_url: str | None = None

    @classmethod
    def of(cls, uri: str, endpoint_url: str | None = None) -> ShardPlace:
        """Parse a URI. Raises ValueError if it names no folder, or no shards."""
        folder, _, pattern = uri.rpartition("/")
        if "://" not in uri or not folder.partition("://")[2].strip("/") or not pattern:
            raise ValueError(
                f"{uri!r} names no shards; write the folder and the names of the shards, as in "
                "s3://bucket/corpus/*.tar, gs://, az://, file:///folder/*.bin or https://"
            )
        if any(each in folder for each in "*?["):
            raise ValueError(f"{uri!r} has * or ? in the name of a folder; the shards of an index lie in one folder")
        return cls(folder, pattern, endpoint_url)

    def open(self) -> ObjectReader:
        """Open the folder for reading. Raises StorageError."""
        if self.folder.startswith(("http://", "https://")):
            return WebFolder(self.folder)
        return self.open_storage()

    def open_storage(self) -> ShardStorage:
        """Open the folder for reading, listing and writing. Raises StorageError; a web server has no such store."""
        if self.folder.startswith(("http://", "https://")):
            raise StorageDenied(
                f"{self.folder} is on a web server, which can't list its files; make the index in the folder that "
                "it serves"
            )
        return ShardStorage(self.folder, endpoint_url=self.endpoint_url)

    def shards(self, storage: ShardStorage) -> Iterator[tuple[str, int]]:
        """Names and sizes of the shards, in order of name."""
        return ((key, size) for key, size in storage.list("") if fnmatch.fnmatchcase(key, self.pattern))


class _BeyondTheEnd(StorageError):
    """A part that begins after the end of its file."""


class WebFolder:
    """A folder of a web server. Implements ObjectReader by range requests."""

    parallel_reads = 4

    def __init__(self, address: str) -> None:
        self._address = address

    def get(self, key: str) -> tuple[bytes, str]:
        with self._answer(key, {}) as answer:
            return answer.read(), answer.headers.get("ETag", "")

    def read_into(self, key: str, offset: int, memory: memoryview) -> int:
        try:
            with self._answer(key, {"Range": f"bytes={offset}-{offset + len(memory) - 1}"}) as answer:
                if answer.status != http.HTTPStatus.PARTIAL_CONTENT:
                    self._check_whole(key, offset, len(memory), answer)
                found: int = answer.readinto(memory)
                if found < len(memory) and answer.length:
                    raise StorageUnavailable(f"{self._address}/{key}: the answer broke off.")
        except _BeyondTheEnd:
            return 0
        return found

    def _check_whole(self, key: str, offset: int, size: int, answer: http.client.HTTPResponse) -> None:
        """Check that an answer which is no part of a file may stand for the part of this size."""
        if (answer.length or 0) > size:
            raise StorageDenied(
                f"{self._address}/{key}: the server sends the whole file for a part of it; serve the shards with "
                "range requests"
            )
        if offset:
            raise StorageUnavailable(
                f"{self._address}/{key}: the server answers {answer.status} {answer.reason} for a part of the file, "
                "and sends something else."
            )

    @contextmanager
    def _answer(self, key: str, headers: dict[str, str]) -> Iterator[http.client.HTTPResponse]:
        address = f"{self._address}/{key}"
        request = urllib.request.Request(address, headers=headers)
        try:
            with urllib.request.urlopen(request, timeout=ANSWER_SECONDS) as answer:
                yield answer
        except urllib.error.HTTPError as error:
            with error:
                if error.code == http.HTTPStatus.NOT_FOUND:
                    raise ObjectNotFound(key) from error
                if error.code == http.HTTPStatus.REQUESTED_RANGE_NOT_SATISFIABLE:
                    raise _BeyondTheEnd(address) from error
                sentence = f"{address}: the server answers {error.code} {one_line(str(error.reason))}."
                if error.code in _AGAIN:
                    raise StorageUnavailable(sentence) from error
                raise StorageDenied(f"{sentence} Correct the address, or let the server send the file.") from error
        except (OSError, http.client.HTTPException) as error:
            raise StorageUnavailable(f"{address} can't be read: {error}.") from error
