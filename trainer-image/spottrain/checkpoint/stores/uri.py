"""Which store a checkpoint URI names. Its client library is imported only when it is needed."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager
from urllib.parse import SplitResult, urlsplit

from spottrain.checkpoint.errors import StorageDenied
from spottrain.checkpoint.stores.storage import CheckpointStorage

SCHEMES = ("file", "s3", "gs", "az")
# What any server accepts. The clouds are stricter, each in its own way.
_BUCKET = re.compile(r"[A-Za-z0-9]([A-Za-z0-9._-]*[A-Za-z0-9])?")
# S3 also has access points. Their names are ARNs, which may contain a slash.
# https://docs.aws.amazon.com/AmazonS3/latest/userguide/access-points-naming.html
_ACCESS_POINT = re.compile(r"arn:aws[a-z-]*:s3[a-z-]*:[a-z0-9-]*:\d{12}:accesspoint[/:][A-Za-z0-9.-]+")


def open_storage(
    uri: str, *, endpoint_url: str | None = None, encryption: str | None = None, create_folder: bool = True
) -> CheckpointStorage:
    """Open the store that a checkpoint URI names.

    Args:
        uri: file:///folder, s3://bucket/prefix, gs://bucket/prefix or az://container/prefix.
        endpoint_url: Address of an S3-compatible or GCS-compatible server, or of Azure's storage account. None: the
            cloud's own, or the account that the environment names.
        encryption: AES256, a KMS key or an encryption scope, for writes to a bucket that demands it. A folder has
            none.
        create_folder: Create a folder that doesn't exist. Without it, such a folder is StorageMissing, as a bucket
            is.

    Raises:
        StorageDenied: The URI can't be used. The message says what to correct.
        StorageMissing: The folder doesn't exist, or not any more.
    """
    if "?" in uri or "#" in uri:  # what follows would be left out, and two runs would share a folder
        raise StorageDenied(
            f"checkpoint.uri {uri!r} contains ? or #, which can't be part of a folder's name; use other characters."
        )
    parts = _split(uri)
    if parts.scheme not in SCHEMES:
        raise StorageDenied(
            f"checkpoint.uri {uri!r} has an unknown scheme; use one of "
            + ", ".join(f"{scheme}://" for scheme in SCHEMES)
            + "."
        )
    if parts.scheme == "file":
        return _open_file(uri, parts.netloc, parts.path, create_folder)
    if not parts.netloc:
        raise StorageDenied(f"checkpoint.uri {uri!r} names no bucket; write {parts.scheme}://BUCKET/PREFIX.")
    bucket, prefix = _bucket_and_prefix(parts.scheme, parts.netloc, parts.path)
    if endpoint_url is not None and not _is_address(endpoint_url):
        raise StorageDenied(
            f"checkpoint.endpointURL (of a command, --endpoint-url) is {endpoint_url!r}, which is not a valid "
            "address; write https://HOST:PORT."
        )
    if parts.scheme == "s3":
        with _client("boto3", uri=uri, extra="s3"):
            from spottrain.checkpoint.stores.s3_storage import S3Storage

            return S3Storage(bucket=bucket, prefix=prefix, endpoint_url=endpoint_url, encryption=encryption)
    if parts.scheme == "az":
        with _client("azure-storage-blob", uri=uri, extra="azure"):
            from spottrain.checkpoint.stores.azure_storage import AzureStorage

            return AzureStorage(bucket=bucket, prefix=prefix, endpoint_url=endpoint_url, encryption_scope=encryption)
    with _client("google-cloud-storage", uri=uri, extra="gcs"):
        from spottrain.checkpoint.stores.gcs_storage import GcsStorage

        return GcsStorage(bucket=bucket, prefix=prefix, endpoint_url=endpoint_url, kms_key=encryption)


@contextmanager
def _client(name: str, *, uri: str, extra: str) -> Iterator[None]:
    """Import and open a store whose client is the distribution `name`. Our `extra` installs that distribution."""
    try:
        yield
    except ImportError as error:
        raise StorageDenied(
            f"checkpoint.uri {uri!r} needs {name}, which can't be imported ({error}). "
            f"Install spottrain with its extra {extra!r}; for a job, in its image."
        ) from error
    except ValueError as error:
        raise StorageDenied(
            f"checkpoint.uri {uri!r} can't be opened: check checkpoint.endpointURL (of a command, --endpoint-url) "
            f"and the environment variables of {name}. ({error})"
        ) from error


def _split(uri: str) -> SplitResult:
    try:
        return urlsplit(uri)
    except ValueError as error:
        raise StorageDenied(f"checkpoint.uri {uri!r} is not a valid URI: {error}.") from error


def _is_address(url: str) -> bool:
    try:
        parts = urlsplit(url)
        return parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
    except ValueError:  # also of a port out of range
        return False


def _bucket_and_prefix(scheme: str, host: str, path: str) -> tuple[str, str]:
    bucket = host
    if scheme == "s3" and host.startswith("arn:"):
        if (arn := _ACCESS_POINT.match(host + path)) is None:
            raise StorageDenied(
                f"{host + path!r} is not the ARN of an access point, which reads "
                "arn:aws:s3:REGION:ACCOUNT:accesspoint/NAME. Correct checkpoint.uri in a new job."
            )
        bucket, path = arn[0], (host + path)[arn.end() :]
    elif not _BUCKET.fullmatch(host):
        raise StorageDenied(
            f"{host!r} can't be the name of a bucket, which consists of letters, digits, dots, hyphens and "
            "underscores, with a letter or digit first and last. Correct checkpoint.uri in a new job."
        )
    return bucket, path.strip("/")


def _open_file(uri: str, host: str, path: str, create_folder: bool) -> CheckpointStorage:
    from spottrain.checkpoint.stores.file_storage import FileStorage

    if host not in ("", "localhost") or not path.strip("/"):
        raise StorageDenied(f"checkpoint.uri {uri!r} is not an absolute path of a folder; write file:///FOLDER.")
    return FileStorage(path, create=create_folder)
