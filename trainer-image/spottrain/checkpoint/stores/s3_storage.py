"""A store in a bucket of S3, or of any server that speaks its protocol."""

from __future__ import annotations

import base64
import contextlib
import hashlib
import logging
import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import count, islice
from typing import Any, TypeVar

import botocore.session
from botocore.config import Config
from zlib_ng import zlib_ng

from spottrain.checkpoint.errors import (
    ObjectNotFound,
    PreconditionFailed,
    StorageDenied,
    StorageError,
    StorageUnavailable,
)
from spottrain.checkpoint.stores.s3_answers import (
    DENIED,
    BeyondTheEnd,
    BrokenOff,
    Conflict,
    Refused,
    S3Answers,
    UploadGone,
)
from spottrain.checkpoint.stores.s3_client import s3_client
from spottrain.checkpoint.stores.storage import ANSWER_SECONDS, Buffer, Pieces, pieces_of, whole
from spottrain.checkpoint.stores.upload_body import UploadBody

logger = logging.getLogger(__name__)

T = TypeVar("T")

PART_BYTES = 8 << 20
_LARGE_PART_BYTES = 64 << 20
_MAX_PARTS = 10_000
_PARALLEL_PARTS = 4
_PAGE_OBJECTS = 1000  # of a listing, and of a deletion
_READ_BYTES = 1 << 20  # botocore copies what it reads, which is fast while it is in the processor's cache
_CONFLICT_RETRIES = 10
_BROKEN_ANSWERS = 3


class S3Storage:
    """Implements CheckpointStorage. The etag is S3's. Conditional writes are S3's If-Match and If-None-Match."""

    parallel_reads = 8

    def __init__(
        self,
        *,
        bucket: str,
        prefix: str = "",
        endpoint_url: str | None = None,
        encryption: str | None = None,
        max_attempts: int | None = None,
        answer_seconds: float = ANSWER_SECONDS,
    ) -> None:
        """Open a bucket.

        Credentials and region come from the places that boto3 looks at (workload identity, environment).

        Args:
            bucket: Name of the bucket, or ARN of an access point.
            prefix: Prefix of all keys, without a slash at its ends.
            endpoint_url: Address of an S3-compatible server. None: AWS_ENDPOINT_URL_S3, AWS_ENDPOINT_URL, or AWS.
            encryption: What writes ask for: AES256, or a KMS key. None: the bucket decides.
            max_attempts: How often to send a request, with growing pauses. None: AWS_MAX_ATTEMPTS, or 6.
            answer_seconds: How long a connection may stall before the request is sent again.
        """
        self._bucket = bucket
        self._prefix = f"{prefix}/" if prefix else ""
        self._endpoint = endpoint_url or os.environ.get("AWS_ENDPOINT_URL_S3") or os.environ.get("AWS_ENDPOINT_URL")
        self._encryption = _encryption(encryption)
        self._answers = S3Answers(bucket, self._prefix, self._endpoint)
        attempts = max_attempts or int(os.environ.get("AWS_MAX_ATTEMPTS", "6"))
        with self._answers.sentences(""):
            self._client: Any = s3_client(
                endpoint_url=self._endpoint,
                region_name=os.environ.get("AWS_REGION") or _configured_region() or "us-east-1",
                config=Config(
                    connect_timeout=5,
                    read_timeout=answer_seconds,
                    retries={"mode": "standard", "total_max_attempts": attempts},
                    max_pool_connections=4 * _PARALLEL_PARTS,
                    # The manifest holds the checksums of what is read, and not every server knows the header.
                    response_checksum_validation="when_required",
                    # Servers other than AWS rarely have a host name for each bucket.
                    s3={"addressing_style": "path" if self._endpoint else "auto"},
                ),
            )
        # Over TLS, the checksums of the parts are enough. SHA-256 of everything would only take processors from the
        # training. Only the client knows for certain where it sends to, as the user's ~/.aws/config may say so.
        self._client.meta.config.s3["payload_signing_enabled"] = self._client.meta.endpoint_url.startswith("http:")
        self._client.meta.events.register_last("before-call.s3", _send_at_once)
        self._sends_checksums = self._client.meta.config.request_checksum_calculation != "when_required"
        self._deletes_singly = False

    def put(self, key: str, data: Buffer, *, if_match: str | None = None, if_absent: bool = False) -> str:
        condition = {"IfMatch": if_match} if if_match is not None else {"IfNoneMatch": "*"} if if_absent else {}
        body = bytes(data)
        for _ in range(_CONFLICT_RETRIES):
            try:
                return str(self._call("put_object", key, Body=body, **condition, **self._encryption)["ETag"])
            except Conflict:
                # A different conditional write was under way. S3 asks to send this one again.
                continue
            except ObjectNotFound as error:
                # If the object of a condition is gone, AWS says so, instead of 412.
                raise PreconditionFailed(key) from error
        raise StorageUnavailable(
            f"{self._answers.where(key)}: other writers kept changing the object. Check that no other job uses the "
            "same checkpoint.uri."
        )

    def upload(self, key: str, data: Buffer | Pieces) -> None:
        if len(data) <= PART_BYTES:
            view = whole(data)
            self._call("put_object", key, Body=UploadBody(view), **self._checksum(view), **self._encryption)
        else:
            self._upload_parts(key, data)

    def get(self, key: str) -> tuple[bytes, str]:
        return self._whole(lambda: self._get(key))

    def read_into(self, key: str, offset: int, memory: memoryview) -> int:
        return self._whole(lambda: self._read_into(key, offset, memory))

    def _get(self, key: str) -> tuple[bytes, str]:
        answer = self._call("get_object", key)
        with self._answers.reading(key):
            return answer["Body"].read(), str(answer["ETag"])

    def _read_into(self, key: str, offset: int, memory: memoryview) -> int:
        try:
            answer = self._call("get_object", key, Range=f"bytes={offset}-{offset + len(memory) - 1}")
        except BeyondTheEnd:
            return 0
        self._answers.check_part(key, offset, answer)
        body, filled = answer["Body"], 0
        with self._answers.reading(key):
            while filled < len(memory) and (length := body.readinto(memory[filled : filled + _READ_BYTES])):
                filled += length
        return filled

    def list(self, prefix: str) -> Iterator[tuple[str, int]]:
        pages = self._client.get_paginator("list_objects_v2").paginate(
            Bucket=self._bucket, Prefix=self._prefix + prefix, MaxKeys=_PAGE_OBJECTS
        )
        with self._answers.of_the_bucket(prefix):
            for page in pages:
                for found in page.get("Contents", ()):
                    yield found["Key"].removeprefix(self._prefix), int(found["Size"])

    def delete(self, keys: Iterable[str]) -> None:
        remaining = iter(keys)
        while batch := list(islice(remaining, _PAGE_OBJECTS)):
            if not self._deletes_singly:
                try:
                    self._delete_together(batch)
                    continue
                except Refused as error:
                    # Some servers refuse the checksum of the request (Backblaze B2), and older ones ask for MD5.
                    logger.info("Objects are deleted one by one from now on: %s", error)
                    self._deletes_singly = True
            with ThreadPoolExecutor(_PARALLEL_PARTS) as pool:
                list(pool.map(self._delete_one, batch))

    def _delete_together(self, keys: Sequence[str]) -> None:
        objects = [{"Key": self._prefix + key} for key in keys]
        with self._answers.of_the_bucket("objects"):
            answer = self._client.delete_objects(Bucket=self._bucket, Delete={"Objects": objects, "Quiet": True})
        if errors := answer.get("Errors"):
            first = errors[0]
            kind = StorageDenied if first.get("Code") in DENIED else StorageUnavailable
            where = self._answers.where(first["Key"].removeprefix(self._prefix))
            raise kind(f"{where} could not be deleted: {first.get('Message')}")

    def _delete_one(self, key: str) -> None:
        with contextlib.suppress(ObjectNotFound):
            self._call("delete_object", key)

    def keeps_deleted(self, key: str) -> str | None:
        described = self._call("head_object", key)
        if until := described.get("ObjectLockRetainUntilDate"):
            return f"object lock keeps each object until its date, for this one {until:%Y-%m-%d}"
        if described.get("VersionId", "null") != "null":
            return "the bucket keeps versions of deleted objects"
        return None

    def abandon_uploads(self, prefix: str, is_over: Callable[[str], bool]) -> int:
        abandoned = 0
        with self._answers.of_the_bucket(prefix):
            pages = self._client.get_paginator("list_multipart_uploads").paginate(
                Bucket=self._bucket, Prefix=self._prefix + prefix
            )
            uploads = [upload for page in pages for upload in page.get("Uploads", ())]
        for upload in uploads:
            key = upload["Key"].removeprefix(self._prefix)
            if is_over(key):
                with contextlib.suppress(UploadGone):  # a different process was first
                    self._call("abort_multipart_upload", key, UploadId=upload["UploadId"])
                    abandoned += 1
        return abandoned

    def _upload_parts(self, key: str, data: Buffer | Pieces) -> None:
        size = _part_bytes(data)
        algorithm = {"ChecksumAlgorithm": "CRC32"} if self._sends_checksums else {}
        upload = self._call("create_multipart_upload", key, **algorithm, **self._encryption)["UploadId"]

        def send(number: int, part: memoryview) -> dict[str, Any]:
            checksum = self._checksum(part)
            sent = self._call(
                "upload_part", key, UploadId=upload, PartNumber=number, Body=UploadBody(part), **checksum
            )
            known = {name: value for name, value in checksum.items() if name in sent}
            return {"PartNumber": number, "ETag": sent["ETag"], **known}

        try:
            sent: list[dict[str, Any]] = []
            with ThreadPoolExecutor(_PARALLEL_PARTS) as pool:
                for piece in pieces_of(data):
                    parts = [piece[begin : begin + size] for begin in range(0, len(piece), size)]
                    sent += pool.map(send, count(len(sent) + 1), parts)
            self._call("complete_multipart_upload", key, UploadId=upload, MultipartUpload={"Parts": sent})
        except BaseException:
            with contextlib.suppress(StorageError):
                self._call("abort_multipart_upload", key, UploadId=upload)
            raise

    def _checksum(self, data: memoryview) -> dict[str, str]:
        """The checksum of a body, as an argument of a call.

        Without CRC-32, boto3 would compute one, and over TLS it would send the body in small pieces that it copies
        again and again while it holds the interpreter lock. Not every server knows its header: for those, botocore
        has the setting `when_required`, and every server knows MD5.
        """
        if self._sends_checksums:
            return {"ChecksumCRC32": _base64(zlib_ng.crc32(data).to_bytes(4))}
        return {"ContentMD5": _base64(hashlib.md5(data, usedforsecurity=False).digest())}

    def _call(self, operation: str, key: str, **arguments: Any) -> dict[str, Any]:
        with self._answers.sentences(key):
            answer: dict[str, Any] = getattr(self._client, operation)(
                Bucket=self._bucket, Key=self._prefix + key, **arguments
            )
        return answer

    def _whole(self, read: Callable[[], T]) -> T:
        """Read again if an answer breaks off. boto3 repeats requests, but not for that."""
        for _ in range(_BROKEN_ANSWERS):
            with contextlib.suppress(BrokenOff):
                return read()
        return read()


def _configured_region() -> str | None:
    """The region of AWS_DEFAULT_REGION, or of the profile in ~/.aws/config."""
    region: str | None = botocore.session.Session().get_config_variable("region")
    return region


def _encryption(asked: str | None) -> dict[str, str]:
    """The arguments of a write by which it asks for encryption."""
    if asked is None:
        return {}
    if asked == "AES256":
        return {"ServerSideEncryption": asked}
    return {"ServerSideEncryption": "aws:kms", "SSEKMSKeyId": asked}


def _part_bytes(data: Buffer | Pieces) -> int:
    """Size of the parts, in bytes.

    Some parts are sent at once. There are no more than that needs: each holds the interpreter lock for milliseconds.
    Some servers want all parts but the last to have the same size, so that those of a piece divide it.
    """
    least = -(-len(data) // _MAX_PARTS)
    if isinstance(data, Buffer):
        return max(least, min(max(PART_BYTES, -(-len(data) // (4 * _PARALLEL_PARTS))), _LARGE_PART_BYTES))
    size = max(PART_BYTES, data.piece_bytes // _PARALLEL_PARTS)
    return size if size >= least else data.piece_bytes


def _base64(digest: bytes) -> str:
    return base64.b64encode(digest).decode()


def _send_at_once(params: dict[str, Any], **_: Any) -> None:
    """Drop `Expect: 100-continue` from requests.

    By this header, botocore asks the server before it sends a file. That costs a round trip a part, or a second if
    the server doesn't know it.
    """
    params["headers"].pop("Expect", None)
