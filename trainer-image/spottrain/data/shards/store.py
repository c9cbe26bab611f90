"""Where shards lie: in a folder of a bucket, a file system or a web server, under names of one pattern."""

from __future__ import annotations

import fnmatch
import http.client
import logging
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TypeVar

from spottrain.checkpoint.errors import ObjectNotFound, StorageDenied, StorageUnavailable
from spottrain.checkpoint.stores.storage import ANSWER_SECONDS, PAUSES, ObjectReader
from spottrain.data.shards.shard_storage import ShardStorage

logger = logging.getLogger(__name__)

T = TypeVar("T")

_AGAIN = frozenset({408, 425, 429, 500, 502, 503, 504})


def through_outages(read: Callable[[], T], *, sleep: Callable[[float], None] = time.sleep) -> T:
    """What `read` returns. While the store does not answer, it is asked again.

    Raises:
        StorageUnavailable: It has not answered for five minutes.
        StorageError: What `read` raises otherwise.
    """
    for pause in PAUSES:
        try:
            return read()
        except StorageUnavailable as error:
            if pause == PAUSES[0]:
                logger.warning("The store of the shards is asked again for %d s: %s", sum(PAUSES), error)
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


class WebFolder:
    """A folder of a web server. Implements ObjectReader by range requests."""

    parallel_reads = 4

    def __init__(self, address: str) -> None:
        self._address = address

    def get(self, key: str) -> tuple[bytes, str]:
        content, tag = self._request(key, {})
        return content, tag

    def read_into(self, key: str, offset: int, memory: memoryview) -> int:
        content, _ = self._request(key, {"Range": f"bytes={offset}-{offset + len(memory) - 1}"})
        if len(content) > len(memory):
            raise StorageDenied(
                f"{self._address}/{key}: the server sends the whole file for a part of it; serve the shards with "
                "range requests"
            )
        memory[: len(content)] = content
        return len(content)

    def _request(self, key: str, headers: dict[str, str]) -> tuple[bytes, str]:
        address = f"{self._address}/{key}"
        try:
            with urllib.request.urlopen(
                urllib.request.Request(address, headers=headers), timeout=ANSWER_SECONDS
            ) as answer:
                return answer.read(), answer.headers.get("ETag", "")
        except urllib.error.HTTPError as error:
            with error:
                if error.code == http.HTTPStatus.NOT_FOUND:
                    raise ObjectNotFound(key) from error
                if error.code == http.HTTPStatus.REQUESTED_RANGE_NOT_SATISFIABLE:
                    return b"", ""
                kind = StorageUnavailable if error.code in _AGAIN else StorageDenied
                raise kind(f"{address}: the server answers {error.code} {error.reason}.") from error
        except (OSError, http.client.HTTPException) as error:
            raise StorageUnavailable(f"{address} can't be read: {error}.") from error
