"""A store in a bucket of Google Cloud Storage."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterable, Iterator, MutableSequence, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import requests
from google.api_core.exceptions import (
    Forbidden,
    GoogleAPICallError,
    GoogleAPIError,
    NotFound,
    RequestRangeNotSatisfiable,
    RetryError,
    ServerError,
    TooManyRequests,
    Unauthorized,
)
from google.api_core.exceptions import PreconditionFailed as GenerationMismatch
from google.auth.credentials import AnonymousCredentials
from google.auth.exceptions import DefaultCredentialsError, GoogleAuthError, TransportError
from google.cloud.storage import Blob, Client
from google.cloud.storage.exceptions import DataCorruption
from google.cloud.storage.retry import DEFAULT_RETRY

from spottrain.checkpoint.errors import (
    CredentialsMissing,
    ObjectNotFound,
    PreconditionFailed,
    StorageDenied,
    StorageError,
    StorageMissing,
    StorageUnavailable,
)
from spottrain.checkpoint.stores.request_pieces import send_in_pieces
from spottrain.checkpoint.stores.storage import ANSWER_SECONDS, Buffer, Pieces, pieces_of, whole
from spottrain.checkpoint.stores.upload_body import UploadBody
from spottrain_runtime.wording import one_line

_PARTS = 4
_CONNECT_SECONDS = 5.0  # also the time in which the store has to take a piece of a body
_SMALLEST_PART = 8 << 20
_PAGE_OBJECTS = 1000
_MOST_COMPOSED = 32
_NO_ANSWER = (requests.RequestException, TransportError, OSError)


class GcsStorage:
    """Implements CheckpointStorage. The etag is an object's generation number.

    Large objects are sent as up to four parts at once and composed in the bucket.
    """

    parallel_reads = 8

    def __init__(
        self,
        *,
        bucket: str,
        prefix: str = "",
        endpoint_url: str | None = None,
        kms_key: str | None = None,
        retry_seconds: float = 60.0,
        answer_seconds: float = ANSWER_SECONDS,
    ) -> None:
        """Credentials are Google's application default ones. A server at `endpoint_url` gets none.

        Args:
            bucket: Name of the bucket.
            prefix: Prefix of all keys, without a slash at its ends.
            endpoint_url: Address of a GCS-compatible server. None: STORAGE_EMULATOR_HOST, or Google.
            kms_key: Resource name of the Cloud KMS key that encrypts what is written. None: the bucket decides.
            retry_seconds: How long to retry a request, with growing pauses.
            answer_seconds: How long a connection may stall before the request is sent again.
        """
        self._patience: dict[str, Any] = {
            "retry": DEFAULT_RETRY.with_timeout(retry_seconds),
            "timeout": (_CONNECT_SECONDS, answer_seconds),
        }
        self._prefix = f"{prefix}/" if prefix else ""
        self._kms_key = kms_key
        endpoint = endpoint_url or os.environ.get("STORAGE_EMULATOR_HOST")
        self._name = f"gs://{bucket}/{self._prefix}"
        anonymous: Any = AnonymousCredentials  # untyped
        server: dict[str, Any] = (
            {"credentials": anonymous(), "client_options": {"api_endpoint": endpoint}} if endpoint else {}
        )
        with self._sentences(""):
            try:
                # Objects belong to a bucket, whose name is enough. Many credentials have no project.
                client: Any = Client(project=None, **server)
            except (DefaultCredentialsError, OSError) as error:
                raise CredentialsMissing(
                    f"No credentials for {self._name}: give the job's service account access by workload identity, "
                    "or set GOOGLE_APPLICATION_CREDENTIALS."
                ) from error
        send_in_pieces(client._http)
        self._client = client
        self._bucket = client.bucket(bucket)

    def put(self, key: str, data: Buffer, *, if_match: str | None = None, if_absent: bool = False) -> str:
        expected = int(if_match) if if_match is not None else 0 if if_absent else None
        blob = self._blob(key)
        with self._sentences(key):
            try:
                blob.upload_from_string(
                    bytes(data), if_generation_match=expected, checksum="crc32c", **self._patience
                )
            except NotFound as error:
                # If the object of a condition is gone, some servers say so, instead of 412.
                if if_match is not None and self._bucket_exists():
                    raise PreconditionFailed(key) from error
                raise
        return str(blob.generation)

    def upload(self, key: str, data: Buffer | Pieces) -> None:
        if len(data) <= _SMALLEST_PART:
            self.put(key, whole(data))
            return
        names: list[str] = []
        try:
            with ThreadPoolExecutor(_PARTS) as pool:
                for piece in pieces_of(data):
                    size = max(_SMALLEST_PART, -(-len(piece) // _PARTS))
                    parts = [piece[begin : begin + size] for begin in range(0, len(piece), size)]
                    new = [f"{key}.part-{number:05}" for number in range(len(names), len(names) + len(parts))]
                    names += new
                    list(pool.map(self._send, new, parts))
            self._compose(key, names)
        finally:
            with contextlib.suppress(StorageError):
                self.delete(names)

    def get(self, key: str) -> tuple[bytes, str]:
        blob = self._blob(key)
        with self._sentences(key):
            data: bytes = blob.download_as_bytes(**self._patience)
        return data, str(blob.generation)

    def read_into(self, key: str, offset: int, memory: memoryview) -> int:
        with self._sentences(key):
            try:
                data: bytes = self._blob(key).download_as_bytes(
                    start=offset, end=offset + len(memory) - 1, checksum=None, **self._patience
                )
            except RequestRangeNotSatisfiable:
                return 0
        if len(data) > len(memory):
            raise StorageDenied(
                f"{self._name}{key}: the server sends the whole object for a part of it. Use one that knows ranges."
            )
        memory[: len(data)] = data
        return len(data)

    def list(self, prefix: str) -> Iterator[tuple[str, int]]:
        with self._sentences(prefix):
            blobs = self._client.list_blobs(
                self._bucket, prefix=self._prefix + prefix, page_size=_PAGE_OBJECTS, **self._patience
            )
            for blob in blobs:
                yield blob.name.removeprefix(self._prefix), int(blob.size)

    def delete(self, keys: Iterable[str]) -> None:
        for key in keys:
            with contextlib.suppress(ObjectNotFound), self._sentences(key):
                self._blob(key).delete(**self._patience)

    def keeps_deleted(self, key: str) -> str | None:
        """Soft delete keeps them, but only who may read the bucket's settings can know."""
        return None

    def abandon_uploads(self, prefix: str, is_over: Callable[[str], bool]) -> int:
        """Do nothing: `list` shows the parts of an unfinished upload. They are objects, and `delete` removes them."""
        return 0

    def _send(self, key: str, part: memoryview) -> None:
        if len(part) <= _SMALLEST_PART:
            self.put(key, part)  # Google's client sends this size in one request, for which it needs bytes
            return
        # MD5, because it releases the interpreter lock. Google's CRC-32C doesn't, and takes no views.
        with self._sentences(key):
            self._blob(key).upload_from_file(UploadBody(part), size=len(part), checksum="md5", **self._patience)

    def _compose(self, key: str, names: MutableSequence[str]) -> None:
        """Make an object of others, some at a time. What is made on the way is added to `names`."""
        parts = [*names]
        while len(parts) > _MOST_COMPOSED:
            groups = [parts[begin : begin + _MOST_COMPOSED] for begin in range(0, len(parts), _MOST_COMPOSED)]
            parts = [f"{group[0]}-joined" for group in groups]
            names += parts
            for name, group in zip(parts, groups, strict=True):
                self._compose_at_once(name, group)
        self._compose_at_once(key, parts)

    def _compose_at_once(self, key: str, names: Sequence[str]) -> None:
        with self._sentences(key):
            self._blob(key).compose([self._blob(name) for name in names], **self._patience)

    def _bucket_exists(self) -> bool:
        exists: bool = self._bucket.exists(**self._patience)
        return exists

    def _blob(self, key: str) -> Blob:
        return self._bucket.blob(self._prefix + key, kms_key_name=self._kms_key)

    @contextlib.contextmanager
    def _sentences(self, key: str) -> Iterator[None]:
        where = f"{self._name}{key}"
        try:
            yield
        except GenerationMismatch as error:
            raise PreconditionFailed(key) from error
        except NotFound as error:
            raise self._not_found(key) from error
        except DataCorruption as error:
            raise StorageUnavailable(f"{where} was damaged on the way: {one_line(str(error))}") from error
        except (Forbidden, Unauthorized) as error:
            raise StorageDenied(
                f"Access to {where} is denied ({one_line(error.message)}): let the job's service account read, "
                "write, list and delete there."
            ) from error
        except (ServerError, TooManyRequests, RetryError, *_NO_ANSWER) as error:
            last = error.cause if isinstance(error, RetryError) else error
            if not isinstance(last, _NO_ANSWER):
                raise StorageUnavailable(f"{where} failed, after retries: {error}") from error
            raise StorageUnavailable(
                f"{where} can't be reached: check checkpoint.endpointURL (of a command, --endpoint-url) "
                f"and the network. ({error})"
            ) from error
        except GoogleAuthError as error:
            # It may pass: the metadata server of workload identity takes its time to start, and nobody has retried.
            raise StorageUnavailable(
                f"No valid credentials for {where}: check the job's service account and its workload identity. "
                f"({error})"
            ) from error
        except GoogleAPICallError as error:
            raise StorageDenied(f"{where} refused the request: {error}") from error

    def _not_found(self, key: str) -> StorageError:
        try:
            missing = not self._bucket_exists()
        except (GoogleAPIError, GoogleAuthError, requests.RequestException, OSError):
            missing = False
        if missing:
            return StorageMissing(
                f"The bucket gs://{self._bucket.name} does not exist: create it, or correct "
                "checkpoint.uri in a new job."
            )
        return ObjectNotFound(key)
