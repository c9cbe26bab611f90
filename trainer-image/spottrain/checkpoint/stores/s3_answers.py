"""What S3 and servers like it answer, as errors with sentences for the person who runs the job."""

from __future__ import annotations

import contextlib
import http
from collections.abc import Iterator, Mapping
from email.utils import formatdate
from typing import Any

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

_LOST = {"PreconditionFailed", "412"}
_CONFLICT = {"ConditionalRequestConflict", "409"}
_BAD_KEYS = {
    "InvalidAccessKeyId": "the store does not know the access key. Correct AWS_ACCESS_KEY_ID in env, or the Secret "
    "that holds it.",
    "SignatureDoesNotMatch": "the secret key does not belong to the access key. Correct AWS_SECRET_ACCESS_KEY in "
    "env, or the Secret that holds it.",
    "ExpiredToken": "the credentials have expired. Renew them; static keys with an AWS_SESSION_TOKEN expire with it.",
}
DENIED = {"AccessDenied", "403", "AllAccessDisabled", *_BAD_KEYS}
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
_ALLOW = (
    "let the job's service account read, write, list and delete there. If a policy of the bucket denies it, change "
    "that policy, or send what it asks for (checkpoint.encryption)."
)


class Refused(StorageDenied):
    """The server doesn't take the request as it is."""


class Conflict(StorageUnavailable):
    """S3's 409. Send the same conditional request again."""


class UploadGone(StorageUnavailable):
    """An upload in parts that is complete or aborted."""


class BrokenOff(StorageUnavailable):
    """An answer that broke off."""


class BeyondTheEnd(StorageError):
    """The range starts after the object's last byte."""


class S3Answers:
    """Turns what fails into errors of checkpoints, for one folder of a bucket."""

    def __init__(self, bucket: str, prefix: str, endpoint: str | None) -> None:
        """`prefix` ends with a slash unless it is empty. Without an `endpoint`, the store is Amazon's."""
        self._bucket = bucket
        self._prefix = prefix
        self._endpoint = endpoint

    def where(self, key: str) -> str:
        return f"s3://{self._bucket}/{self._prefix}{key}{self._at_server()}"

    def _at_server(self) -> str:
        return f" at {self._endpoint}" if self._endpoint else ""

    @contextlib.contextmanager
    def reading(self, key: str) -> Iterator[None]:
        with self.sentences(key):
            try:
                yield
            except (IncompleteReadError, ResponseStreamingError, ReadTimeoutError, HTTPError) as error:
                # botocore doesn't translate all errors of urllib3: not that of a damaged TLS record.
                raise BrokenOff(f"The answer of {self.where(key)} broke off: {error}") from error

    def check_part(self, key: str, offset: int, answer: Mapping[str, Any]) -> None:
        """Check that an answer begins where it was asked to. 200 stands for the whole object."""
        if offset and answer["ResponseMetadata"]["HTTPStatusCode"] == http.HTTPStatus.OK:
            raise Refused(
                f"{self.where(key)}: the server sends the whole object for a part of it. Use one that knows ranges."
            )

    @contextlib.contextmanager
    def of_the_bucket(self, key: str) -> Iterator[None]:
        """Sentences of a request to the bucket. No single object can be missing from it."""
        try:
            with self.sentences(key):
                yield
        except ObjectNotFound as error:
            # It may pass: a proxy says so if it finds no server.
            raise StorageUnavailable(
                f"No bucket answers at s3://{self._bucket}{self._at_server()}: check checkpoint.endpointURL (of a "
                f"command, --endpoint-url). ({error.__cause__})"
            ) from error

    @contextlib.contextmanager
    def sentences(self, key: str) -> Iterator[None]:
        try:
            yield
        except ClientError as error:
            raise self._of_answer(key, error) from error
        except (NoCredentialsError, PartialCredentialsError) as error:
            raise CredentialsMissing(
                f"No credentials for {self.where(key)}: give the job's service account access to the bucket, "
                "or set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY."
            ) from error
        except (EndpointConnectionError, ConnectTimeoutError, ReadTimeoutError) as error:
            raise StorageUnavailable(
                f"{self.where(key)} can't be reached: check checkpoint.endpointURL (of a command, --endpoint-url) "
                f"and the network. ({error})"
            ) from error
        except SSLError as error:
            raise StorageUnavailable(
                f"{self.where(key)} has no valid certificate, or doesn't speak https: check checkpoint.endpointURL "
                f"(of a command, --endpoint-url). ({error})"
            ) from error
        except (BotoCoreError, HTTPError) as error:
            raise StorageUnavailable(f"{self.where(key)} gave an invalid answer: {error}") from error
        except (OSError, RuntimeError) as error:
            # botocore raises these if it can't read a token's file, or if credentials are expired when they arrive.
            raise StorageUnavailable(
                f"No valid credentials for {self.where(key)}: check the job's service account and its role. ({error})"
            ) from error

    def _of_answer(self, key: str, error: ClientError) -> StorageError:
        code = str(error.response.get("Error", {}).get("Code", ""))
        status = str(error.response.get("ResponseMetadata", {}).get("HTTPStatusCode", ""))
        seen = {code, status}
        where = self.where(key)
        words = f"{code}: {message}" if (message := error.response.get("Error", {}).get("Message")) else code
        if code in _NO_BUCKET:
            return StorageMissing(
                f"The {_NO_BUCKET[code]} s3://{self._bucket}{self._at_server()} does not exist: create it, or "
                "correct checkpoint.uri in a new job."
            )
        if code == "NoSuchUpload":
            return UploadGone(f"A different process aborted the upload of {where}.")
        if code == "RequestTimeTooSkewed":
            stores = error.response["ResponseMetadata"].get("HTTPHeaders", {}).get("date", "another time")
            return StorageUnavailable(
                f"{where} refused the request, because this node's clock is wrong: it says "
                f"{formatdate(usegmt=True)}, the store's {stores}. Set the node's clock."
            )
        if code == "InvalidRange" or status == "416":
            return BeyondTheEnd(where)
        for codes, make in (
            (_LOST, lambda: PreconditionFailed(key)),
            (_CONFLICT, lambda: Conflict(where)),
            (_MISSING, lambda: ObjectNotFound(key)),
            (_FULL, lambda: StorageFull(f"{where}: the store is full. Free space, or lower checkpoint.keep.")),
            (DENIED, lambda: StorageDenied(f"Access to {where} is denied ({words}): {_BAD_KEYS.get(code, _ALLOW)}")),
        ):
            if seen & codes:
                return make()
        if (status.startswith(("3", "4")) or status == "501") and not seen & _PASSING:
            return Refused(f"{where} refused the request: {error}{_remedy(status, str(error))}")
        return StorageUnavailable(f"{where} failed, after retries: {error}")


def _remedy(status: str, words: str) -> str:
    """What to do about a refusal, if its status or its words say so."""
    if "x-amz-checksum" in words or "x-amz-sdk-checksum" in words:
        return " Set AWS_REQUEST_CHECKSUM_CALCULATION=when_required in the job's env."
    if status.startswith("3"):
        return (
            " The server refers to another address or region: correct checkpoint.endpointURL, or set AWS_REGION in "
            "the job's env."
        )
    return ""
