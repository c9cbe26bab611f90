"""The storage account that `az://` is about, and who asks there: the job's address, and the environment."""

from __future__ import annotations

import base64
import os
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from azure.core.credentials import AzureNamedKeyCredential, AzureSasCredential

from spottrain.checkpoint.errors import StorageDenied

_CONNECTION_STRING = "AZURE_STORAGE_CONNECTION_STRING"


@dataclass(frozen=True, slots=True, kw_only=True)
class AzureAccount:
    """Address of a storage account's blobs, and its key or signature, if there is one.

    The variables are those of Azure's command line. A variable of its own counts before the connection string.
    """

    url: str
    name: str | None
    key: str | None
    signature: str | None

    @classmethod
    def of(cls, bucket: str, endpoint_url: str | None, environment: Mapping[str, str] = os.environ) -> AzureAccount:
        """Find the account of a bucket. Raises StorageDenied if nothing names it."""
        parts = _connection_string(environment.get(_CONNECTION_STRING, ""))
        name = environment.get("AZURE_STORAGE_ACCOUNT") or parts.get("accountname")
        url = endpoint_url or parts.get("blobendpoint")
        if url is None and name:
            url = f"https://{name}.blob.{parts.get('endpointsuffix', 'core.windows.net')}"
        if url is None:
            raise StorageDenied(
                f"Nothing names the storage account of the bucket az://{bucket}: set checkpoint.endpointURL (of a "
                "command, --endpoint-url) to https://ACCOUNT.blob.core.windows.net, or AZURE_STORAGE_ACCOUNT in env."
            )
        key = environment.get("AZURE_STORAGE_KEY") or parts.get("accountkey")
        if key and not _is_base64(key):
            raise StorageDenied(
                "AZURE_STORAGE_KEY, or the key in AZURE_STORAGE_CONNECTION_STRING, is not the key of a storage "
                "account, which is in base64: copy it from the account again, without a line break at its end."
            )
        signature = environment.get("AZURE_STORAGE_SAS_TOKEN") or parts.get("sharedaccesssignature")
        return cls(url=url.rstrip("/"), name=name or _name_in(url), key=key, signature=signature)

    def credential(self) -> Any:
        """Who asks: the account's key, a shared access signature, or else the identity that Azure's client finds."""
        if self.key and self.name:
            return AzureNamedKeyCredential(self.name, self.key)
        if self.signature:
            return AzureSasCredential(self.signature.lstrip("?"))
        from azure.identity import DefaultAzureCredential  # takes 0.3 s to import

        return DefaultAzureCredential()


def _is_base64(text: str) -> bool:
    try:
        base64.b64decode(text, validate=True)
    except ValueError:
        return False
    return True


def _name_in(url: str) -> str | None:
    """The account in an address of Azure: the first part of the host."""
    host = url.partition("://")[2].partition("/")[0]
    name, found, _ = host.partition(".blob.")
    return name if found else None


def _connection_string(text: str) -> dict[str, str]:
    """Its parts. Their names have no case."""
    parts = {}
    for part in filter(None, (each.strip() for each in text.split(";"))):
        name, found, value = part.partition("=")
        if not found:
            raise StorageDenied(
                f"{_CONNECTION_STRING} is not a connection string, which reads "
                "DefaultEndpointsProtocol=https;AccountName=…;AccountKey=…: copy it from the storage account again."
            )
        parts[name.lower()] = value
    return parts
