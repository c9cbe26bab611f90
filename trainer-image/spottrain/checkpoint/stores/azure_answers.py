"""What Azure's Blob Storage answers, as errors with sentences for the person who runs the job."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from http import HTTPStatus

import requests
from azure.core.exceptions import AzureError, ClientAuthenticationError, HttpResponseError

from spottrain.checkpoint.errors import (
    CredentialsMissing,
    ObjectNotFound,
    PreconditionFailed,
    StorageDenied,
    StorageError,
    StorageMissing,
    StorageUnavailable,
)
from spottrain_runtime.wording import one_line

# https://learn.microsoft.com/rest/api/storageservices/blob-service-error-codes
_LOST = {"ConditionNotMet", "BlobAlreadyExists"}
_NO_BUCKET = {"ContainerNotFound", "ContainerBeingDeleted", "ContainerDisabled"}
_NO_OBJECT = {"BlobNotFound", "ResourceNotFound"}
_BEYOND = "InvalidRange"
# Client errors that may pass. The block list is invalid if a different process has replaced the object meanwhile.
_PASSING = {"InvalidBlockList", "Md5Mismatch", "OperationTimedOut", "PendingCopyOperation"}
_PASSING_STATUSES = {HTTPStatus.REQUEST_TIMEOUT, HTTPStatus.TOO_MANY_REQUESTS}
_REFUSED = {HTTPStatus.UNAUTHORIZED, HTTPStatus.FORBIDDEN}
_ALLOW = (
    "let the job's service account read, write, list and delete there (the role Storage Blob Data Contributor), and "
    "let the account's network rules admit the pods."
)
_KEPT = "keeps each object, and each commit has to replace HEAD. Use a bucket without one, in a new job."
_REMEDIES = {
    "KeyBasedAuthenticationNotPermitted": "the account takes no keys. Use workload identity, without a key in env.",
    "BlobImmutableDueToPolicy": f"a time-based retention policy {_KEPT}",
    "BlobImmutableDueToLegalHold": f"a legal hold {_KEPT}",
    "LeaseIdMissing": "somebody holds a lease on it. Break the lease (az storage blob lease break), and let nothing "
    "take one below checkpoint.uri.",
}


class BeyondTheEnd(StorageError):
    """The range starts after the object's last byte."""


class AzureAnswers:
    """Turns what fails into errors of checkpoints, for one folder of a bucket."""

    def __init__(self, bucket: str, prefix: str, account_url: str) -> None:
        """`prefix` ends with a slash unless it is empty."""
        self._bucket = bucket
        self._prefix = prefix
        self._account_url = account_url

    def where(self, key: str) -> str:
        return f"az://{self._bucket}/{self._prefix}{key} at {self._account_url}"

    @contextlib.contextmanager
    def sentences(self, key: str) -> Iterator[None]:
        try:
            yield
        except ClientAuthenticationError as error:
            if _code(error):
                raise self._of_answer(key, error) from error
            # It may pass: a new federated credential takes minutes until all of Azure's servers know it.
            raise CredentialsMissing(
                f"No credentials for {self.where(key)}: give the job's service account and its pods Azure's workload "
                f"identity, or set AZURE_STORAGE_KEY or AZURE_STORAGE_SAS_TOKEN. ({one_line(str(error.message))})"
            ) from error
        except HttpResponseError as error:
            if error.response is None:
                raise StorageUnavailable(f"The answer of {self.where(key)} broke off: {_words(error)}") from error
            raise self._of_answer(key, error) from error
        except (AzureError, requests.RequestException, OSError) as error:
            raise StorageUnavailable(
                f"{self.where(key)} can't be reached: check checkpoint.endpointURL (of a command, --endpoint-url) "
                f"and the network. ({error})"
            ) from error

    def _of_answer(self, key: str, error: HttpResponseError) -> StorageError:
        code, where, words = _code(error), self.where(key), _words(error)
        status = error.status_code or 0
        if code in _LOST:
            return PreconditionFailed(key)
        if code in _NO_OBJECT:
            return ObjectNotFound(key)
        if code == _BEYOND:
            return BeyondTheEnd(where)
        if code in _NO_BUCKET:
            return StorageMissing(
                f"The bucket az://{self._bucket} at {self._account_url} does not exist: create it, or correct "
                f"checkpoint.uri in a new job. ({words})"
            )
        if code in _REMEDIES or status in _REFUSED:
            return StorageDenied(f"Access to {where} is denied ({words}): {_REMEDIES.get(code, _ALLOW)}")
        if status == HTTPStatus.NOT_FOUND:  # by a different server: Azure's gives a code
            return StorageUnavailable(
                f"No bucket answers at {where}: check checkpoint.endpointURL (of a command, --endpoint-url). "
                f"({words})"
            )
        if code in _PASSING or status in _PASSING_STATUSES or status >= HTTPStatus.INTERNAL_SERVER_ERROR:
            return StorageUnavailable(f"{where} failed, after retries: {words}")
        return StorageDenied(f"{where} refused the request: {words}")


def _code(error: HttpResponseError) -> str:
    """Azure's name of the error; nothing if a different server answered."""
    code = getattr(error, "error_code", None)
    return str(getattr(code, "value", code) or "")


def _words(error: HttpResponseError) -> str:
    """The store's own words, without the lines that only Azure's support can read."""
    details: dict[str, str] = getattr(error, "additional_info", None) or {}
    said = (str(error.message).split("\n", 1)[0].strip(), details.get("authenticationerrordetail"))
    return ": ".join(each for each in (_code(error), *said) if each)
