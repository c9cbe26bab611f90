"""Lists and watches of a real API server, for the caches.

The informers of the Kubernetes client turn each object into a model, of which ten thousand don't fit, have no
timeouts, and know nothing of own writes. kopf's watches, which show the jobs, select nothing on the server. So this
asks for JSON, and reads it line by line.
"""

from __future__ import annotations

import json
import random
import ssl
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager

import aiohttp
import kubernetes.client as k8s

from spottrain_api.contract import GROUP, LABEL_MANAGED_BY, MANAGED_BY, PLURAL, VERSION
from spottrain_operator.cluster.client import (
    ClusterError,
    ExpiredError,
    Kind,
    Listing,
    Manifest,
    WatchEvent,
    retry_after,
)
from spottrain_operator.cluster.json_text import parsed

PAGE_SIZE = 500
CONNECT_SECONDS = 5.0
READ_SECONDS = 30.0
# The server ends a watch after this time, so that connections spread over its replicas again.
WATCH_SECONDS = 300
# A watch that died silently shows nothing: the server sends a bookmark every minute.
INACTIVITY_SECONDS = 70.0
# A line holds one object, and etcd holds none above 1.5 MB.
MAX_LINE_BYTES = 4 * 2**20
_GONE = 410

_PATHS = {Kind.JOBS: f"/apis/{GROUP}/{VERSION}", Kind.PODS: "/api/v1", Kind.NODES: "/api/v1"}
_PLURALS = {Kind.JOBS: PLURAL, Kind.PODS: "pods", Kind.NODES: "nodes"}
_SELECTED: Mapping[Kind, Mapping[str, str]] = {Kind.PODS: {LABEL_MANAGED_BY: MANAGED_BY}}


class KubernetesWatch:
    """Implements WatchClient with the credentials of the Kubernetes client.

    Use it as an async context manager.
    """

    def __init__(self, configuration: k8s.Configuration) -> None:
        self._configuration = configuration
        self._session: aiohttp.ClientSession | None = None

    async def __aenter__(self) -> KubernetesWatch:
        connector = aiohttp.TCPConnector(ssl=_tls(self._configuration))
        self._session = aiohttp.ClientSession(
            self._configuration.host.rstrip("/"), connector=connector, read_bufsize=MAX_LINE_BYTES, trust_env=True
        )
        return self

    async def __aexit__(self, *_: object) -> None:
        if self._session is not None:
            await self._session.close()

    async def list_kind(
        self,
        kind: Kind,
        *,
        namespace: str = "",
        labels: Mapping[str, str] | None = None,
        keep: Callable[[Manifest], Manifest] = lambda item: item,
    ) -> Listing:
        items: list[Manifest] = []
        query = _query(kind, labels) | {"limit": str(PAGE_SIZE)}
        timeout = aiohttp.ClientTimeout(total=READ_SECONDS, sock_connect=CONNECT_SECONDS)
        while True:
            async with self._get(_path(kind, namespace), query, timeout) as response:
                page = parsed(await response.read())
            items += map(keep, page["items"])
            if not page["metadata"].get("continue"):
                return Listing(items=tuple(items), version=int(page["metadata"]["resourceVersion"]))
            query["continue"] = page["metadata"]["continue"]

    async def watch_kind(self, kind: Kind, version: int) -> AsyncIterator[WatchEvent]:
        seconds = random.randrange(WATCH_SECONDS // 2, WATCH_SECONDS)
        query = _query(kind, None) | {
            "watch": "true",
            "allowWatchBookmarks": "true",
            "resourceVersion": str(version),
            "timeoutSeconds": str(seconds),
        }
        timeout = aiohttp.ClientTimeout(total=None, sock_connect=CONNECT_SECONDS, sock_read=INACTIVITY_SECONDS)
        async with self._get(_path(kind, ""), query, timeout) as response:
            async for line in response.content:
                yield _event(parsed(line))

    @asynccontextmanager
    async def _get(
        self, path: str, query: Mapping[str, str], timeout: aiohttp.ClientTimeout
    ) -> AsyncIterator[aiohttp.ClientResponse]:
        if self._session is None:
            raise RuntimeError("Use KubernetesWatch as an async context manager.")
        try:
            async with self._session.get(
                path,
                params=query,
                headers=_headers(self._configuration),
                timeout=timeout,
                proxy=self._configuration.proxy or None,
                server_hostname=self._configuration.tls_server_name or None,
            ) as response:
                if response.status >= 400:
                    raise _refused(response, await response.text())
                yield response
        except (aiohttp.ClientError, TimeoutError, OSError, ValueError) as error:
            raise ClusterError(f"the API server can't be reached: {error or type(error).__name__}") from error


def _path(kind: Kind, namespace: str) -> str:
    inside = f"/namespaces/{namespace}" if namespace else ""
    return f"{_PATHS[kind]}{inside}/{_PLURALS[kind]}"


def _query(kind: Kind, labels: Mapping[str, str] | None) -> dict[str, str]:
    selected = dict(_SELECTED.get(kind, {})) | dict(labels or {})
    if not selected:
        return {}
    return {"labelSelector": ",".join(f"{key}={value}" for key, value in sorted(selected.items()))}


def _event(line: Manifest) -> WatchEvent:
    kind, found = line["type"], line["object"]
    if kind == "ERROR":
        raise _error(found.get("code", 0), found.get("message", "no reason was given"))
    version = int(found["metadata"]["resourceVersion"])
    return WatchEvent(object=None if kind == "BOOKMARK" else found, version=version, deleted=kind == "DELETED")


def _refused(response: aiohttp.ClientResponse, text: str) -> ClusterError:
    wait = retry_after(response.headers)
    try:
        return _error(response.status, str(json.loads(text)["message"]), wait)
    except (ValueError, KeyError, TypeError):
        return _error(response.status, text[:500], wait)


def _error(status: int, sentence: str, wait: float | None = None) -> ClusterError:
    if status == _GONE:
        return ExpiredError(sentence)
    return ClusterError(f"the API server answered {status}: {sentence}", retry_after=wait)


def _headers(configuration: k8s.Configuration) -> dict[str, str]:
    """Return the headers with the credentials of a request.

    The configuration reads a token again as it rotates.
    """
    settings = configuration.auth_settings().values()
    return {each["key"]: each["value"] for each in settings if each["in"] == "header" and each["value"]}


def _tls(configuration: k8s.Configuration) -> ssl.SSLContext:
    context = ssl.create_default_context(cafile=configuration.ssl_ca_cert)
    if not configuration.verify_ssl:
        context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    if configuration.cert_file:
        context.load_cert_chain(configuration.cert_file, configuration.key_file)
    return context
