"""The watcher's few calls to the API server, without a client library."""

from __future__ import annotations

import json
import ssl
from collections.abc import AsyncIterator, Mapping
from pathlib import Path
from typing import Any, Self

import aiohttp
from aiohttp.http_exceptions import LineTooLong

from spottrain_api.contract.names import ENV_SERVICEACCOUNT_DIR, SERVICEACCOUNT_DIR

TIMEOUT = aiohttp.ClientTimeout(total=10, sock_connect=3)
WATCH_SECONDS = 240
# A watch that died silently shows nothing: the server sends a bookmark every minute.
WATCH_TIMEOUT = aiohttp.ClientTimeout(total=None, sock_connect=3, sock_read=70)
# A watch event holds a whole object on one line. etcd holds none above 1.5 MiB, but pods and nodes not as JSON, which
# takes six bytes for each <, > and &.
MAX_LINE_BYTES = 10 * 2**20


class KubernetesError(Exception):
    """The API server gave no usable answer.

    `status` is the HTTP status, if there was one.
    """

    def __init__(self, message: str, status: int | None = None) -> None:
        super().__init__(message)
        self.status = status


class KubernetesApi:
    """Sends requests with the pod's service account.

    Reads the token each time, since the kubelet renews it.
    """

    def __init__(self, session: aiohttp.ClientSession, url: str, token_file: Path, ca_file: Path | None) -> None:
        self._session = session
        self._url = url
        self._token_file = token_file
        self._ssl = ssl.create_default_context(cafile=ca_file) if ca_file else True

    @classmethod
    def in_cluster(cls, session: aiohttp.ClientSession, environ: Mapping[str, str]) -> Self:
        """Configure the client as every pod can.

        Raises:
            KubernetesError: This process doesn't run in a cluster.
        """
        host, port = environ.get("KUBERNETES_SERVICE_HOST"), environ.get("KUBERNETES_SERVICE_PORT")
        if not host or not port:
            raise KubernetesError("KUBERNETES_SERVICE_HOST and KUBERNETES_SERVICE_PORT aren't set: not in a pod?")
        folder = Path(environ.get(ENV_SERVICEACCOUNT_DIR) or SERVICEACCOUNT_DIR)
        url = f"https://{f'[{host}]' if ':' in host else host}:{port}"
        try:
            return cls(session, url, folder / "token", folder / "ca.crt")
        except OSError as error:
            raise KubernetesError(f"no service account in {folder}: {error}") from error

    async def get(self, path: str, **params: str) -> dict[str, Any]:
        """Read an object or a list.

        Raises:
            KubernetesError: There was no usable answer.
        """
        return await self._request("GET", path, params=params)

    async def merge_patch(self, path: str, body: dict[str, Any]) -> dict[str, Any]:
        """Send a merge patch.

        Raises:
            KubernetesError: There was no usable answer. Its status is 409 if the resourceVersion in the body is
                outdated.
        """
        headers = {"Content-Type": "application/merge-patch+json"}
        return await self._request("PATCH", path, data=json.dumps(body), headers=headers)

    async def watch(self, path: str, resource_version: str, **params: str) -> AsyncIterator[dict[str, Any]]:
        """Yield the events after `resource_version`, until the server ends the watch.

        Bookmarks are left out: they only show that the server is there.

        Raises:
            KubernetesError: There was no usable answer.
        """
        query = params | {
            "watch": "true",
            "allowWatchBookmarks": "true",
            "resourceVersion": resource_version,
            "timeoutSeconds": str(WATCH_SECONDS),
        }
        try:
            async with self._session.get(
                self._url + path,
                params=query,
                headers=self._headers(),
                ssl=self._ssl,
                timeout=WATCH_TIMEOUT,
                read_bufsize=MAX_LINE_BYTES // 2,  # aiohttp reads lines of up to twice as much
            ) as response:
                await _check(response)
                async for line in response.content:
                    event = json.loads(line)
                    if event["type"] != "BOOKMARK":
                        yield event
        except (aiohttp.ClientError, LineTooLong, TimeoutError, OSError, ValueError) as error:
            raise KubernetesError(f"watch of {path}: {error!r}") from error

    async def _request(self, method: str, path: str, **options: Any) -> dict[str, Any]:
        try:
            headers = self._headers() | options.pop("headers", {})
            async with self._session.request(
                method, self._url + path, headers=headers, ssl=self._ssl, timeout=TIMEOUT, **options
            ) as response:
                await _check(response)
                answer: dict[str, Any] = await response.json()
                return answer
        except (aiohttp.ClientError, TimeoutError, OSError, ValueError) as error:
            raise KubernetesError(f"{method} {path}: {error!r}") from error

    def _headers(self) -> dict[str, str]:
        return {"Authorization": f"Bearer {self._token_file.read_text().strip()}"}


async def _check(response: aiohttp.ClientResponse) -> None:
    if response.status >= 400:
        text = (await response.text())[:300]
        raise KubernetesError(f"{response.method} {response.url.path}: {response.status} {text}", response.status)
