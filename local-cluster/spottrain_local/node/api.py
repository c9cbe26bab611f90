"""A small client of the Kubernetes API: plain REST and watch over aiohttp.

It authenticates with a client certificate.
"""

import asyncio
import json
import logging
import ssl
from collections.abc import AsyncIterator
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import aiohttp

logger = logging.getLogger(__name__)

JSONObject = dict[str, Any]

STRATEGIC_MERGE = "application/strategic-merge-patch+json"
WATCH_SECONDS = 240


class ApiError(Exception):
    """The API server refused a request.

    `status` is the HTTP status, `reason` is Kubernetes' reason.
    """

    def __init__(self, status: int, reason: str, message: str) -> None:
        super().__init__(message)
        self.status = status
        self.reason = reason


# A request raises these while the API server does not answer: wait and retry.
UNREACHABLE = (aiohttp.ClientError, asyncio.TimeoutError, OSError)


class ApiClient:
    """Requests to one API server; use as an async context manager."""

    def __init__(self, server: str, *, ca_file: Path, cert_file: Path, key_file: Path) -> None:
        self._server = server.rstrip("/")
        self._tls = ssl.create_default_context(cafile=str(ca_file))
        self._tls.load_cert_chain(cert_file, key_file)
        self._session: aiohttp.ClientSession | None = None

    async def __aenter__(self) -> Self:
        self._session = aiohttp.ClientSession(connector=aiohttp.TCPConnector(ssl=self._tls, limit=20))
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._session:
            await self._session.close()

    def _open(self) -> aiohttp.ClientSession:
        if self._session is None:
            raise RuntimeError("Use ApiClient as an async context manager: `async with ApiClient(...)`.")
        return self._session

    async def request(
        self,
        method: str,
        path: str,
        *,
        body: JSONObject | None = None,
        content_type: str = "application/json",
        query: dict[str, str] | None = None,
    ) -> JSONObject:
        """Send one request and return the decoded answer.

        Raises:
            ApiError: The API server refused it.
            UNREACHABLE: One of these, if the API server does not answer.
        """
        data = None if body is None else json.dumps(body).encode()
        text = await self._text(method, path, query, data, content_type)
        return json.loads(text)  # type: ignore[no-any-return]

    async def text(self, path: str) -> str:
        """Read what isn't JSON, such as the server's metrics."""
        return await self._text("GET", path)

    async def _text(
        self,
        method: str,
        path: str,
        query: dict[str, str] | None = None,
        data: bytes | None = None,
        content_type: str = "application/json",
    ) -> str:
        async with self._open().request(
            method,
            self._server + path,
            params=query,
            data=data,
            headers={"Content-Type": content_type} if data is not None else None,
            timeout=aiohttp.ClientTimeout(total=30),
        ) as response:
            text = await response.text()
        if response.status >= 400:
            raise _api_error(response.status, text)
        return text

    async def get(self, path: str, **query: str) -> JSONObject:
        """Read one object or list."""
        return await self.request("GET", path, query=query)

    async def create(self, path: str, body: JSONObject) -> JSONObject:
        """Create an object in a collection (or a subresource)."""
        return await self.request("POST", path, body=body)

    async def patch(self, path: str, body: JSONObject) -> JSONObject:
        """Apply a strategic merge patch."""
        return await self.request("PATCH", path, body=body, content_type=STRATEGIC_MERGE)

    async def delete(self, path: str, body: JSONObject | None = None) -> JSONObject:
        """Delete an object, with DeleteOptions as the body."""
        return await self.request("DELETE", path, body=body)

    async def watch(self, path: str, **query: str) -> AsyncIterator[JSONObject]:
        """Yield watch events until the server ends the watch.

        Raises:
            ApiError: The API server refused it. After status 410, list again.
        """
        query |= {"watch": "true", "allowWatchBookmarks": "true", "timeoutSeconds": str(WATCH_SECONDS)}
        timeout = aiohttp.ClientTimeout(total=None, sock_connect=10, sock_read=WATCH_SECONDS + 30)
        async with self._open().get(
            self._server + path, params=query, timeout=timeout, read_bufsize=2**22
        ) as response:
            if response.status >= 400:
                raise _api_error(response.status, await response.text())
            async for line in response.content:
                event = json.loads(line)
                if event["type"] == "ERROR":
                    status = event["object"]
                    raise ApiError(status.get("code", 500), status.get("reason", ""), status.get("message", ""))
                yield event


def _api_error(status: int, text: str) -> ApiError:
    try:
        answer = json.loads(text)
        return ApiError(status, answer.get("reason", ""), answer.get("message", text))
    except (ValueError, AttributeError):
        return ApiError(status, "", text[:500])


async def list_and_watch(client: ApiClient, path: str, **query: str) -> AsyncIterator[JSONObject]:
    """Follow a collection for ever.

    Yields `{"type": "SYNC", "items": [...]}` after each list, and watch events between lists. An object that a list
    lacks is gone. Reconnects by itself, from the last resource version if the server still knows it.
    """
    version = ""
    while True:
        try:
            if not version:
                answer = await client.get(path, **query)
                version = answer["metadata"]["resourceVersion"]
                yield {"type": "SYNC", "items": answer.get("items") or []}
            async for event in client.watch(path, resourceVersion=version, **query):
                version = event["object"]["metadata"]["resourceVersion"]
                if event["type"] != "BOOKMARK":
                    yield event
        except ApiError as error:
            if error.status != 410:
                logger.warning("watching %s: %s", path, error)
                await asyncio.sleep(1)
            version = ""
        except (*UNREACHABLE, ValueError) as error:
            logger.info("watching %s: %s; reconnecting", path, error)
            await asyncio.sleep(0.5)
