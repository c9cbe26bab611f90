"""A store in a bucket of S3, or of any server that speaks its protocol."""

from __future__ import annotations

import base64
import contextlib
import os
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from email.utils import formatdate
from itertools import islice
from typing import Any, TypeVar

import botocore.session
from botocore.config import Config
from botocore.exceptions import (
    BotoCoreError,
    ClientError,
    ConnectTimeoutError,
    EndpointConnectionError,
    IncompleteReadError,
    NoCredentialsError,
    PartialCredentialsError,
    ReadTimeoutError,
    ResponseStreamingError,
    SSLError,
)
from urllib3.exceptions import HTTPError
from zlib_ng import zlib_ng

from spottrain.checkpoint.errors import (
    CredentialsMissing,
    ObjectNotFound,
    PreconditionFailed,
    StorageDenied,
    StorageError,
    StorageFull,
    StorageMissing,
    StorageUnavailable,
)
from spottrain.checkpoint.stores.s3_client import s3_client
from spottrain.checkpoint.stores.storage import ANSWER_SECONDS, Buffer
from spottrain.checkpoint.stores.upload_body import UploadBody

T = TypeVar("T")

PART_BYTES = 8 << 20
_LARGE_PART_BYTES = 64 << 20
_MAX_PARTS = 10_000
_PARALLEL_PARTS = 4
_DELETE_BATCH = 1000
_READ_BYTES = 1 << 20  # botocore copies what it reads, which is fast while it is in the processor's cache
_CONFLICT_RETRIES = 10
_BROKEN_ANSWERS = 3

_LOST = {"PreconditionFailed", "412"}
_CONFLICT = {"ConditionalRequestConflict", "409"}
_BAD_KEYS = {
    "InvalidAccessKeyId": "the store does not know the access key. Correct AWS_ACCESS_KEY_ID in env, or the Secret "
    "that holds it.",
    "SignatureDoesNotMatch": "the secret key does not belong to the access key. Correct AWS_SECRET_ACCESS_KEY in "
    "env, or the Secret that holds it.",
    "ExpiredToken": "the credentials have expired. Renew them; static keys with an AWS_SESSION_TOKEN expire with it.",
}
_DENIED = {"AccessDenied", "403", "AllAccessDisabled", *_BAD_KEYS}
_NO_BUCKET = {"NoSuchBucket": "bucket", "NoSuchAccessPoint": "access point"}
_MISSING = {"NoSuchKey", "404", "NotFound"}
_FULL = {"QuotaExceeded", "InsufficientStorage", "XMinioStorageFull", "507"}
# Client errors that may pass, most of them with status 400: what botocore retries (botocore/retries/standard.py and
# special.py) of S3, STS and KMS, and bodies that the way to the store has damaged.
_PASSING = {
    *("408", "429", "RequestTimeout", "RequestTimeoutException", "PriorRequestNotComplete", "IDPCommunicationError"),
    *("Throttling", "ThrottlingException", "ThrottledException", "KMS.ThrottlingException", "SlowDown"),
    *("RequestThrottled", "RequestThrottledException", "TooManyRequestsException", "RequestLimitExceeded"),
    *("BandwidthLimitExceeded", "LimitExceededException", "BadDigest", "IncompleteBody"),
}


class S3Storage:
    """Implements CheckpointStorage. The etag is S3's. Conditional writes are S3's If-Match and If-None-Match."""

    parallel_reads = 8

    def __init__(
        self,
        *,
        bucket: str,
        prefix: str = "",
        endpoint_url: str | None = None,
        max_attempts: int | None = None,
        answer_seconds: float = ANSWER_SECONDS,
    ) -> None:
        """Open a bucket.

        Credentials and region come from the places that boto3 looks at (workload identity, environment).

        Args:
            bucket: Name of the bucket, or ARN of an access point.
            prefix: Prefix of all keys, without a slash at its ends.
            endpoint_url: Address of an S3-compatible server. None: AWS_ENDPOINT_URL_S3, AWS_ENDPOINT_URL, or AWS.
            max_attempts: How often to send a request, with growing pauses. None: AWS_MAX_ATTEMPTS, or 6.
            answer_seconds: How long a connection may stall before the request is sent again.
        """
        self._bucket = bucket
        self._prefix = f"{prefix}/" if prefix else ""
        self._endpoint = endpoint_url or os.environ.get("AWS_ENDPOINT_URL_S3") or os.environ.get("AWS_ENDPOINT_URL")
        attempts = max_attempts or int(os.environ.get("AWS_MAX_ATTEMPTS", "6"))
        with self._sentences(""):
            self._client: Any = s3_client(
                endpoint_url=self._endpoint,
                region_name=os.environ.get("AWS_REGION") or _configured_region() or "us-east-1",
                config=Config(
                    connect_timeout=5,
                    read_timeout=answer_seconds,
                    retries={"mode": "standard", "total_max_attempts": attempts},
                    max_pool_connections=4 * _PARALLEL_PARTS,
                    # Servers other than AWS rarely have a host name for each bucket.
                    s3={"addressing_style": "path" if self._endpoint else "auto"},
                ),
            )
        # Over TLS, the checksums of the parts are enough. SHA-256 of everything would only take processors from the
        # training. Only the client knows for certain where it sends to, as the user's ~/.aws/config may say so.
        self._client.meta.config.s3["payload_signing_enabled"] = self._client.meta.endpoint_url.startswith("http:")
        self._client.meta.events.register_last("before-call.s3", _send_at_once)

    def put(self, key: str, data: Buffer, *, if_match: str | None = None, if_absent: bool = False) -> str:
        condition = {"IfMatch": if_match} if if_match is not None else {"IfNoneMatch": "*"} if if_absent else {}
        body = bytes(data)
        for _ in range(_CONFLICT_RETRIES):
            try:
                return str(self._call("put_object", key, Body=body, **condition)["ETag"])
            except _Conflict:
                # A different conditional write was under way. S3 asks to send this one again.
                continue
            except ObjectNotFound as error:
                # If the object of a condition is gone, AWS says so, instead of 412.
                raise PreconditionFailed(key) from error
        raise StorageUnavailable(
            f"{self._where(key)}: other writers kept changing the object. Check that no other job uses the same "
            "checkpoint.uri."
        )

    def upload(self, key: str, data: Buffer) -> None:
        view = memoryview(data)
        if len(view) <= PART_BYTES:
            self._call("put_object", key, Body=UploadBody(view), ChecksumCRC32=_crc32(view))
        else:
            self._upload_parts(key, view)

    def get(self, key: str) -> tuple[bytes, str]:
        return self._whole(lambda: self._get(key))

    def read_into(self, key: str, offset: int, memory: memoryview) -> int:
        return self._whole(lambda: self._read_into(key, offset, memory))

    def _get(self, key: str) -> tuple[bytes, str]:
        answer = self._call("get_object", key)
        with self._reading(key):
            return answer["Body"].read(), str(answer["ETag"])

    def _read_into(self, key: str, offset: int, memory: memoryview) -> int:
        try:
            body = self._call("get_object", key, Range=f"bytes={offset}-{offset + len(memory) - 1}")["Body"]
        except _BeyondTheEnd:
            return 0
        filled = 0
        with self._reading(key):
            while filled < len(memory) and (length := body.readinto(memory[filled : filled + _READ_BYTES])):
                filled += length
        return filled

    def list(self, prefix: str) -> Iterator[tuple[str, int]]:
        pages = self._client.get_paginator("list_objects_v2").paginate(
            Bucket=self._bucket, Prefix=self._prefix + prefix
        )
        with self._of_the_bucket(prefix):
            for page in pages:
                for found in page.get("Contents", ()):
                    yield found["Key"].removeprefix(self._prefix), int(found["Size"])

    def delete(self, keys: Iterable[str]) -> None:
        remaining = iter(keys)
        while batch := [{"Key": self._prefix + key} for key in islice(remaining, _DELETE_BATCH)]:
            with self._of_the_bucket("objects"):
                answer = self._client.delete_objects(Bucket=self._bucket, Delete={"Objects": batch, "Quiet": True})
            if errors := answer.get("Errors"):
                first = errors[0]
                kind = StorageDenied if first.get("Code") in _DENIED else StorageUnavailable
                where = self._where(first["Key"].removeprefix(self._prefix))
                raise kind(f"{where} could not be deleted: {first.get('Message')}")

    def abandon_uploads(self, prefix: str, is_over: Callable[[str], bool]) -> int:
        abandoned = 0
        with self._of_the_bucket(prefix):
            pages = self._client.get_paginator("list_multipart_uploads").paginate(
                Bucket=self._bucket, Prefix=self._prefix + prefix
            )
            uploads = [upload for page in pages for upload in page.get("Uploads", ())]
        for upload in uploads:
            key = upload["Key"].removeprefix(self._prefix)
            if is_over(key):
                with contextlib.suppress(_UploadGone):  # a different process was first
                    self._call("abort_multipart_upload", key, UploadId=upload["UploadId"])
                    abandoned += 1
        return abandoned

    def _upload_parts(self, key: str, view: memoryview) -> None:
        size = max(_part_bytes(len(view)), -(-len(view) // _MAX_PARTS))
        upload = self._call("create_multipart_upload", key, ChecksumAlgorithm="CRC32")["UploadId"]

        def send(number: int) -> dict[str, Any]:
            part = view[(number - 1) * size : number * size]
            checksum = _crc32(part)
            sent = self._call(
                "upload_part", key, UploadId=upload, PartNumber=number, Body=UploadBody(part), ChecksumCRC32=checksum
            )
            known = {"ChecksumCRC32": checksum} if "ChecksumCRC32" in sent else {}
            return {"PartNumber": number, "ETag": sent["ETag"], **known}

        try:
            with ThreadPoolExecutor(_PARALLEL_PARTS) as pool:
                parts = list(pool.map(send, range(1, -(-len(view) // size) + 1)))
            self._call("complete_multipart_upload", key, UploadId=upload, MultipartUpload={"Parts": parts})
        except BaseException:
            with contextlib.suppress(StorageError):
                self._call("abort_multipart_upload", key, UploadId=upload)
            raise

    def _call(self, operation: str, key: str, **arguments: Any) -> dict[str, Any]:
        with self._sentences(key):
            answer: dict[str, Any] = getattr(self._client, operation)(
                Bucket=self._bucket, Key=self._prefix + key, **arguments
            )
        return answer

    def _whole(self, read: Callable[[], T]) -> T:
        """Read again if an answer breaks off. boto3 repeats requests, but not for that."""
        for _ in range(_BROKEN_ANSWERS):
            with contextlib.suppress(_BrokenOff):
                return read()
        return read()

    def _where(self, key: str) -> str:
        return f"s3://{self._bucket}/{self._prefix}{key}{self._at_server()}"

    def _at_server(self) -> str:
        return f" at {self._endpoint}" if self._endpoint else ""

    @contextlib.contextmanager
    def _reading(self, key: str) -> Iterator[None]:
        with self._sentences(key):
            try:
                yield
            except (IncompleteReadError, ResponseStreamingError, ReadTimeoutError, HTTPError) as error:
                # botocore doesn't translate all errors of urllib3: not that of a damaged TLS record.
                raise _BrokenOff(f"The answer of {self._where(key)} broke off: {error}") from error

    @contextlib.contextmanager
    def _of_the_bucket(self, key: str) -> Iterator[None]:
        """Sentences of a request to the bucket. No single object can be missing from it."""
        try:
            with self._sentences(key):
                yield
        except ObjectNotFound as error:
            # It may pass: a proxy says so if it finds no server.
            raise StorageUnavailable(
                f"No bucket answers at s3://{self._bucket}{self._at_server()}: check checkpoint.endpointURL (of a "
                f"command, --endpoint-url). ({error.__cause__})"
            ) from error

    @contextlib.contextmanager
    def _sentences(self, key: str) -> Iterator[None]:
        try:
            yield
        except ClientError as error:
            raise self._of_answer(key, error) from error
        except (NoCredentialsError, PartialCredentialsError) as error:
            raise CredentialsMissing(
                f"No credentials for {self._where(key)}: give the job's service account access to the bucket, "
                "or set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY."
            ) from error
        except (EndpointConnectionError, ConnectTimeoutError, ReadTimeoutError) as error:
            raise StorageUnavailable(
                f"{self._where(key)} can't be reached: check checkpoint.endpointURL (of a command, --endpoint-url) "
                f"and the network. ({error})"
            ) from error
        except SSLError as error:
            raise StorageUnavailable(
                f"{self._where(key)} has no valid certificate, or doesn't speak https: check checkpoint.endpointURL "
                f"(of a command, --endpoint-url). ({error})"
            ) from error
        except (BotoCoreError, HTTPError) as error:
            raise StorageUnavailable(f"{self._where(key)} gave an invalid answer: {error}") from error
        except (OSError, RuntimeError) as error:
            # botocore raises these if it can't read a token's file, or if credentials are expired when they arrive.
            raise StorageUnavailable(
                f"No valid credentials for {self._where(key)}: check the job's service account and its role. "
                f"({error})"
            ) from error

    def _of_answer(self, key: str, error: ClientError) -> StorageError:
        code = str(error.response.get("Error", {}).get("Code", ""))
        status = str(error.response.get("ResponseMetadata", {}).get("HTTPStatusCode", ""))
        seen = {code, status}
        where = self._where(key)
        if code in _NO_BUCKET:
            return StorageMissing(
                f"The {_NO_BUCKET[code]} s3://{self._bucket}{self._at_server()} does not exist: create it, or "
                "correct checkpoint.uri in a new job."
            )
        if code == "NoSuchUpload":
            return _UploadGone(f"A different process aborted the upload of {where}.")
        if code == "RequestTimeTooSkewed":
            stores = error.response["ResponseMetadata"].get("HTTPHeaders", {}).get("date", "another time")
            return StorageUnavailable(
                f"{where} refused the request, because this node's clock is wrong: it says "
                f"{formatdate(usegmt=True)}, the store's {stores}. Set the node's clock."
            )
        if code == "InvalidRange" or status == "416":
            return _BeyondTheEnd(where)
        for codes, make in (
            (_LOST, lambda: PreconditionFailed(key)),
            (_CONFLICT, lambda: _Conflict(where)),
            (_MISSING, lambda: ObjectNotFound(key)),
            (_FULL, lambda: StorageFull(f"{where}: the store is full. Free space, or lower checkpoint.keep.")),
            (_DENIED, lambda: StorageDenied(f"Access to {where} is denied ({code}): {_BAD_KEYS.get(code, _ALLOW)}")),
        ):
            if seen & codes:
                return make()
        if status.startswith("4") and not seen & _PASSING:
            return StorageDenied(f"{where} refused the request: {error}")
        return StorageUnavailable(f"{where} failed, after retries: {error}")


def _configured_region() -> str | None:
    """The region of AWS_DEFAULT_REGION, or of the profile in ~/.aws/config."""
    region: str | None = botocore.session.Session().get_config_variable("region")
    return region


def _part_bytes(size: int) -> int:
    """Size of the parts, in bytes, for a file of this size.

    Some parts are sent at once. There are no more than that needs: each holds the interpreter lock for milliseconds.
    """
    return min(max(PART_BYTES, -(-size // (4 * _PARALLEL_PARTS))), _LARGE_PART_BYTES)


def _crc32(data: memoryview) -> str:
    """The checksum in S3's form.

    Without it, boto3 would compute one, and over TLS it would send the body in small pieces that it copies again and
    again while it holds the interpreter lock.
    """
    return base64.b64encode(zlib_ng.crc32(data).to_bytes(4)).decode()


def _send_at_once(params: dict[str, Any], **_: Any) -> None:
    """Drop `Expect: 100-continue` from requests.

    By this header, botocore asks the server before it sends a file. That costs a round trip a part, or a second if
    the server doesn't know it.
    """
    params["headers"].pop("Expect", None)


_ALLOW = "let the job's service account read, write, list and delete there."


class _Conflict(StorageUnavailable):
    """S3's 409. Send the same conditional request again."""


class _UploadGone(StorageUnavailable):
    """An upload in parts that is complete or aborted."""


class _BrokenOff(StorageUnavailable):
    """An answer that broke off."""


class _BeyondTheEnd(StorageError):
    """The range starts after the object's last byte."""
