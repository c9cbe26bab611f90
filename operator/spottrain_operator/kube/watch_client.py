"""Lists and watches of a real API server, for the caches.

The informers of the Kubernetes client turn each object into a model, of which ten thousand don't fit, have no
timeouts, and know nothing of own writes. kopf's watches, which show the jobs, select nothing on the server. So this
asks for JSON, and reads it line by line.
"""

from __future__ import annotations

import json
import random
from collections.abc import AsyncIterator, Callable, Mapping

import aiohttp
import kopf
from aiohttp.http_exceptions import LineTooLong

from spottrain_api.contract.names import GROUP, LABEL_JOB, LABEL_MANAGED_BY, MANAGED_BY, PLURAL, VERSION
from spottrain_operator.kube.api_server import ApiServer, connection_info, refusal
from spottrain_operator.kube.client import Kind, Listing, WatchEvent
from spottrain_operator.kube.errors import ExpiredError
from spottrain_operator.kube.json_text import parsed
from spottrain_operator.kube.resources import Manifest

PAGE_SIZE = 500
CONNECT_SECONDS = 5.0
READ_SECONDS = 30.0
# The server ends a watch after this time, so that connections spread over its replicas again.
WATCH_SECONDS = 300
# A watch that died silently shows nothing: the server sends a bookmark every minute.
INACTIVITY_SECONDS = 70.0
# A line holds one object. etcd holds none above 1.5 MiB, but pods and nodes not as JSON, which takes six bytes for
# each <, > and &.
MAX_LINE_BYTES = 10 * 2**20

_PATHS = {Kind.JOBS: f"/apis/{GROUP}/{VERSION}", Kind.PODS: "/api/v1", Kind.NODES: "/api/v1"}
_PLURALS = {Kind.JOBS: PLURAL, Kind.PODS: "pods", Kind.NODES: "nodes"}
# A pod that names no job, or an empty one, is somebody else's.
_SELECTED = {Kind.PODS: (f"{LABEL_MANAGED_BY}={MANAGED_BY}", LABEL_JOB, f"{LABEL_JOB}!=")}


class KubernetesWatch:
    """Implements WatchClient with connections of its own.

    Use it as an async context manager.
    """

    def __init__(self, connect: Callable[[], kopf.ConnectionInfo] = connection_info) -> None:
        self._api = ApiServer(connect, max_line_bytes=MAX_LINE_BYTES)

    async def __aenter__(self) -> KubernetesWatch:
        await self._api.__aenter__()
        return self

    async def __aexit__(self, *error: object) -> None:
        await self._api.__aexit__(*error)

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
            page = await self._api.request("GET", _path(kind, namespace), params=query, timeout=timeout)
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
        async with self._api.response("GET", _path(kind, ""), params=query, timeout=timeout) as response:
            try:
                async for line in response.content:
                    yield _event(parsed(line))
            except LineTooLong as error:
                # A watch from the same version would meet it again. Lists are not read by lines.
                raise ExpiredError(f"an object takes more than {MAX_LINE_BYTES} bytes") from error


def _path(kind: Kind, namespace: str) -> str:
    inside = f"/namespaces/{namespace}" if namespace else ""
    return f"{_PATHS[kind]}{inside}/{_PLURALS[kind]}"


def _query(kind: Kind, labels: Mapping[str, str] | None) -> dict[str, str]:
    selected = (*_SELECTED.get(kind, ()), *(f"{key}={value}" for key, value in sorted((labels or {}).items())))
    return {"labelSelector": ",".join(selected)} if selected else {}


def _event(line: Manifest) -> WatchEvent:
    kind, found = line["type"], line["object"]
    if kind == "ERROR":
        raise refusal(found.get("code", 0), {}, json.dumps(found))
    version = int(found["metadata"]["resourceVersion"])
    return WatchEvent(object=None if kind == "BOOKMARK" else found, version=version, deleted=kind == "DELETED")
