"""A store in a container of Azure's Blob Storage."""

from __future__ import annotations

import contextlib
import random
import uuid
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import requests
from azure.core import MatchConditions
from azure.core.pipeline.transport import RequestsTransport
from azure.storage.blob import BlobBlock, BlobClient, BlobServiceClient, ExponentialRetry
from requests.adapters import HTTPAdapter

from spottrain.checkpoint.errors import ObjectNotFound, PreconditionFailed, StorageError
from spottrain.checkpoint.stores.azure_account import AzureAccount
from spottrain.checkpoint.stores.azure_answers import AzureAnswers, BeyondTheEnd
from spottrain.checkpoint.stores.request_pieces import send_in_pieces
from spottrain.checkpoint.stores.storage import ANSWER_SECONDS, Buffer, Pieces, pieces_of, whole
from spottrain.checkpoint.stores.upload_body import UploadBody
from spottrain_runtime.wording import counted

PART_BYTES = 8 << 20
_LARGE_PART_BYTES = 64 << 20
_MAX_PARTS = 50_000
_PARALLEL_PARTS = 4
_PIECE_BYTES = 1 << 18
_CONNECT_SECONDS = 5.0  # also the time in which the store has to take a piece of a body
_LONGEST_PAUSE_SECONDS = 20.0
_ONE_REQUEST = 1 << 40
_PAGE_OBJECTS = 5000


class AzureStorage:
    """Implements CheckpointStorage. The etag is Azure's. Conditional writes are Azure's If-Match and If-None-Match.

    Large objects are sent as blocks, several at once, and a list of the blocks makes them the object. The names of
    the blocks are new for each upload, so that of two uploads of a key one wins as a whole.
    """

    parallel_reads = 8

    def __init__(
        self,
        *,
        bucket: str,
        prefix: str = "",
        endpoint_url: str | None = None,
        encryption_scope: str | None = None,
        retries: int = 5,
        answer_seconds: float = ANSWER_SECONDS,
    ) -> None:
        """Open a container.

        Args:
            bucket: Name of the container.
            prefix: Prefix of all keys, without a slash at its ends.
            endpoint_url: Address of the storage account. None: that of AZURE_STORAGE_ACCOUNT, or of
                AZURE_STORAGE_CONNECTION_STRING.
            encryption_scope: What writes ask for. None: the container decides.
            retries: How often a request is sent again, with growing pauses.
            answer_seconds: How long a connection may stall before the request is sent again.
        """
        account = AzureAccount.of(bucket, endpoint_url)
        self._prefix = f"{prefix}/" if prefix else ""
        self._answers = AzureAnswers(bucket, self._prefix, account.url)
        self._encryption: dict[str, Any] = {"encryption_scope": encryption_scope} if encryption_scope else {}
        tries: dict[str, Any] = dict.fromkeys(("retry_total", "retry_connect", "retry_read", "retry_status"), retries)
        with self._answers.sentences(""):
            self._service = BlobServiceClient(
                account.url,
                credential=account.credential(),
                transport=_transport(answer_seconds),
                retry_policy=_Retry(**tries),
                # A read is one request, so that it is of one version of the object.
                max_single_get_size=_ONE_REQUEST,
            )
        self._container = self._service.get_container_client(bucket)

    def put(self, key: str, data: Buffer, *, if_match: str | None = None, if_absent: bool = False) -> str:
        condition: dict[str, Any] = {"overwrite": not if_absent}
        if if_match is not None:
            condition |= {"etag": if_match, "match_condition": MatchConditions.IfNotModified}
        try:
            with self._answers.sentences(key):
                answer = self._blob(key).upload_blob(
                    bytes(data), validate_content=True, **condition, **self._encryption
                )
        except ObjectNotFound as error:  # that of the condition is gone
            raise PreconditionFailed(key) from error
        return str(answer["etag"])

    def upload(self, key: str, data: Buffer | Pieces) -> None:
        if len(data) <= PART_BYTES:
            self.put(key, whole(data))
            return
        size, upload = _part_bytes(data), uuid.uuid4().hex

        def send(name: str, part: memoryview) -> BlobBlock:
            body: Any = UploadBody(part)  # a file, but not in the eyes of its annotations
            with self._answers.sentences(key):
                self._blob(key).stage_block(name, body, length=len(body), validate_content=True, **self._encryption)
            return BlobBlock(name)

        sent: list[BlobBlock] = []
        with ThreadPoolExecutor(_PARALLEL_PARTS) as pool:
            for piece in pieces_of(data):
                parts = [piece[begin : begin + size] for begin in range(0, len(piece), size)]
                names = [f"{upload}-{number:05}" for number in range(len(sent), len(sent) + len(parts))]
                sent += pool.map(send, names, parts)
        with self._answers.sentences(key):
            self._blob(key).commit_block_list(sent, validate_content=True, **self._encryption)

    def get(self, key: str) -> tuple[bytes, str]:
        with self._answers.sentences(key):
            answer = self._blob(key).download_blob()
            return answer.readall(), str(answer.properties.etag)

    def read_into(self, key: str, offset: int, memory: memoryview) -> int:
        try:
            with self._answers.sentences(key):
                data = self._blob(key).download_blob(offset, len(memory)).readall()
        except BeyondTheEnd:
            return 0
        memory[: len(data)] = data
        return len(data)

    def list(self, prefix: str) -> Iterator[tuple[str, int]]:
        with self._answers.sentences(prefix):
            pages = self._container.list_blobs(self._prefix + prefix, results_per_page=_PAGE_OBJECTS)
            for found in pages:
                yield found.name.removeprefix(self._prefix), int(found.size)

    def delete(self, keys: Iterable[str]) -> None:
        with ThreadPoolExecutor(_PARALLEL_PARTS) as pool:
            list(pool.map(self._delete_one, keys))

    def _delete_one(self, key: str) -> None:
        with contextlib.suppress(ObjectNotFound), self._answers.sentences(key):
            self._blob(key).delete_blob(delete_snapshots="include")

    def keeps_deleted(self, key: str) -> str | None:
        with self._answers.sentences(key):
            found = self._blob(key).get_blob_properties()
        if found.has_legal_hold:
            return "a legal hold keeps each object"
        if found.immutability_policy and (until := found.immutability_policy.expiry_time):
            return f"a retention policy keeps each object until its date, for this one {until:%Y-%m-%d}"
        if found.version_id:
            return "the storage account keeps versions of deleted objects"
        return self._soft_delete()

    def _soft_delete(self) -> str | None:
        """Whether deleted objects are kept for some days. Many who may use the bucket may not know that."""
        try:
            with self._answers.sentences(""):
                kept = self._service.get_service_properties()["delete_retention_policy"]
        except StorageError:
            return None
        return f"soft delete keeps deleted objects for {counted(kept.days, 'day')}" if kept.enabled else None

    def abandon_uploads(self, prefix: str, is_over: Callable[[str], bool]) -> int:
        """Drop the blocks of objects that have no list of them yet. Azure drops them after a week, too."""
        with self._answers.sentences(prefix):
            begun = list(self._container.list_blobs(self._prefix + prefix, include=["uncommittedblobs"]))
        # What is committed between the two listings is in the second one.
        whole = {key for key, _ in self.list(prefix)}
        unfinished = [key for each in begun if (key := each.name.removeprefix(self._prefix)) not in whole]
        over = [key for key in unfinished if is_over(key)]
        for key in over:
            # An empty list drops the blocks. Its object is then deleted.
            with contextlib.suppress(PreconditionFailed), self._answers.sentences(key):
                self._blob(key).commit_block_list([], match_condition=MatchConditions.IfMissing)
                self._delete_one(key)
        return len(over)

    def _blob(self, key: str) -> BlobClient:
        return self._container.get_blob_client(self._prefix + key)


class _Retry(ExponentialRetry):
    """Pauses of at most 1, 2, 4, 8 and 16 s. Azure's client waits for 15 s and longer."""

    def get_backoff_time(self, settings: dict[str, Any]) -> float:
        return random.uniform(0.0, min(2.0 ** (settings["count"] - 1), _LONGEST_PAUSE_SECONDS))


class _LargePieces(HTTPAdapter):
    """Connections that read and write more at once than 16 KiB."""

    def init_poolmanager(self, *sizes: Any, **options: Any) -> None:
        super().init_poolmanager(*sizes, **options, blocksize=_PIECE_BYTES)


def _transport(answer_seconds: float) -> RequestsTransport:
    session = requests.Session()
    for scheme in ("https://", "http://"):
        session.mount(scheme, _LargePieces(max_retries=0, pool_maxsize=4 * _PARALLEL_PARTS))
    send_in_pieces(session)
    return RequestsTransport(
        session=session, session_owner=False, connection_timeout=_CONNECT_SECONDS, read_timeout=answer_seconds
    )


def _part_bytes(data: Buffer | Pieces) -> int:
    """Size of the parts, in bytes: no more parts than it takes to send some at once."""
    if not isinstance(data, Buffer):
        return max(PART_BYTES, data.piece_bytes // _PARALLEL_PARTS)
    size = min(max(PART_BYTES, -(-len(data) // (4 * _PARALLEL_PARTS))), _LARGE_PART_BYTES)
    return max(size, -(-len(data) // _MAX_PARTS))
