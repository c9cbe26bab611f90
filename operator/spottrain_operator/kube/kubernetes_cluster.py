"""The objects of a real API server.

The official client turns each object into a model, of which ten thousand don't fit. Its informers have no timeouts
and know nothing of own writes, and kopf's watches, which show the jobs, select nothing on the server. So this asks
for JSON, and reads watches line by line.
"""

from __future__ import annotations

import json
import random
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import AsyncExitStack
from typing import Self

import aiohttp
import kopf
from aiohttp.http_exceptions import LineTooLong

from spottrain_operator.kube.api_server import JSON, MERGE_PATCH, ApiServer, connection_info, refusal
from spottrain_operator.kube.cluster import ALL, Fields, Keep, Labels, Listing, WatchEvent, as_it_is
from spottrain_operator.kube.errors import ConflictError, ExpiredError, InvalidObjectError, NotFoundError
from spottrain_operator.kube.json_text import parsed
from spottrain_operator.kube.limits import DEFAULT_LIMITS, ClientLimits, RequestLimiter, is_urgent
from spottrain_operator.kube.resources import (
    JOBS,
    LEASES,
    NODES,
    PODS,
    SECRETS,
    TOKEN_REVIEWS,
    WORKLOADS,
    Manifest,
    Resource,
)

# A request that waits for a connection has no limit: those before it have.
TIMEOUT = aiohttp.ClientTimeout(total=None, sock_connect=3.0, sock_read=15.0)
# Requests at once. Urgent ones have connections of their own, so that none waits for the answer to another.
NUM_CONNECTIONS = 12
NUM_URGENT_CONNECTIONS = 8
# Reviews of tokens have connections and a limit of their own, so that a flood of tokens delays no pass.
NUM_REVIEW_CONNECTIONS = 4
# The lease is renewed without a limit: a leader that can't has to end. Without a certificate, no agent is heard.
UNLIMITED = frozenset({LEASES, SECRETS})
# Caches hold them. Their lists and watches have connections of their own, and no limit.
CACHED = frozenset({JOBS, NODES, PODS, WORKLOADS})

PAGE_SIZE = 500
CONNECT_SECONDS = 5.0
READ_SECONDS = 30.0
LIST_TIMEOUT = aiohttp.ClientTimeout(total=READ_SECONDS, sock_connect=CONNECT_SECONDS)
# The server ends a watch after this time, so that connections spread over its replicas again.
WATCH_SECONDS = 300
# A watch that died silently shows nothing: the server sends a bookmark every minute.
INACTIVITY_SECONDS = 70.0
WATCH_TIMEOUT = aiohttp.ClientTimeout(total=None, sock_connect=CONNECT_SECONDS, sock_read=INACTIVITY_SECONDS)
# A line holds one object. etcd holds none above 1.5 MiB, but pods and nodes not as JSON, which takes six bytes for
# each <, > and &.
MAX_LINE_BYTES = 10 * 2**20


class KubernetesCluster:
    """Implements Cluster on a real API server, within limits.

    Use it as an async context manager.

    Args:
        limits: Of the requests.
        connect: Finds the address and the credentials.
    """

    def __init__(
        self, limits: ClientLimits = DEFAULT_LIMITS, *, connect: Callable[[], kopf.ConnectionInfo] = connection_info
    ) -> None:
        self._ordinary = ApiServer(connect, max_connections=NUM_CONNECTIONS)
        self._urgent = ApiServer(connect, max_connections=NUM_URGENT_CONNECTIONS)
        self._of_reviews = ApiServer(connect, max_connections=NUM_REVIEW_CONNECTIONS)
        self._of_caches = ApiServer(connect, max_line_bytes=MAX_LINE_BYTES)
        self._limiter = RequestLimiter(limits)
        self._review_limiter = RequestLimiter(limits)
        self._open = AsyncExitStack()

    async def __aenter__(self) -> Self:
        for api in (self._ordinary, self._urgent, self._of_reviews, self._of_caches):
            await self._open.enter_async_context(api)
        return self

    async def __aexit__(self, *error: object) -> None:
        await self._open.aclose()

    async def get(self, resource: Resource, name: str, *, namespace: str = "") -> Manifest | None:
        try:
            return await self._request("GET", resource, resource.path(namespace, name))
        except NotFoundError:
            return None

    async def get_raw(self, path: str) -> Manifest:
        """Read a path that belongs to no resource, as `kubectl get --raw` does. Tokens wait for the answer."""
        await self._review_limiter.turn()
        return await self._of_reviews.request("GET", path, timeout=TIMEOUT)

    async def list(
        self,
        resource: Resource,
        *,
        namespace: str = "",
        labels: Labels = ALL,
        fields: Fields = ALL,
        keep: Keep = as_it_is,
    ) -> Listing:
        items: list[Manifest] = []
        query = _selectors(labels, fields) | {"limit": str(PAGE_SIZE)}
        while True:
            page = await self._page(resource, resource.path(namespace), query)
            items += map(keep, page["items"])
            if not page["metadata"].get("continue"):
                return Listing(items=tuple(items), version=int(page["metadata"]["resourceVersion"]))
            query["continue"] = page["metadata"]["continue"]

    async def create(self, resource: Resource, manifest: Manifest) -> Manifest:
        namespace = manifest["metadata"]["namespace"] if resource.namespaced else ""
        return await self._request("POST", resource, resource.path(namespace), body=manifest)

    async def patch(
        self, resource: Resource, name: str, patch: Manifest, *, namespace: str = "", uid: str = ""
    ) -> Manifest | None:
        path = resource.path(namespace, name)
        body = patch | {"metadata": patch.get("metadata", {}) | {"uid": uid}} if uid else patch
        try:
            return await self._request("PATCH", resource, path, body=body, content_type=MERGE_PATCH)
        except (NotFoundError, ConflictError):  # a new object of the same name may have replaced it
            return None
        except InvalidObjectError as error:
            if not str(error).startswith("metadata.uid:"):  # it can't change: this is another object
                raise
            return None

    async def replace(self, resource: Resource, manifest: Manifest, *, subresource: str = "") -> Manifest:
        meta = manifest["metadata"]
        path = resource.path(meta.get("namespace", ""), meta["name"]) + (f"/{subresource}" if subresource else "")
        try:
            return await self._request("PUT", resource, path, body=manifest)
        except NotFoundError as error:
            raise ConflictError(str(error)) from error

    async def delete(
        self, resource: Resource, name: str, *, namespace: str = "", uid: str, grace_seconds: int | None = None
    ) -> Manifest | None:
        body: Manifest = {"preconditions": {"uid": uid}, "propagationPolicy": "Background"}
        if grace_seconds is not None:
            body["gracePeriodSeconds"] = grace_seconds
        try:
            return await self._request("DELETE", resource, resource.path(namespace, name), body=body)
        except (NotFoundError, ConflictError):  # a new object of the same name may have replaced it
            return None

    async def watch(self, resource: Resource, version: int, *, labels: Labels = ALL) -> AsyncIterator[WatchEvent]:
        query = _selectors(labels, ALL) | {
            "watch": "true",
            "allowWatchBookmarks": "true",
            "resourceVersion": str(version),
            "timeoutSeconds": str(random.randrange(WATCH_SECONDS // 2, WATCH_SECONDS)),
        }
        async with self._of_caches.response("GET", resource.path(), params=query, timeout=WATCH_TIMEOUT) as response:
            try:
                async for line in response.content:
                    yield _event(parsed(line))
            except LineTooLong as error:
                # A watch from the same version would meet it again. Lists are not read by lines.
                raise ExpiredError(f"an object takes more than {MAX_LINE_BYTES} bytes") from error

    async def _page(self, resource: Resource, path: str, query: dict[str, str]) -> Manifest:
        if resource in CACHED:
            return await self._of_caches.request("GET", path, params=query, timeout=LIST_TIMEOUT)
        return await self._request("GET", resource, path, params=query)

    async def _request(
        self,
        method: str,
        resource: Resource,
        path: str,
        *,
        params: Mapping[str, str] | None = None,
        body: Manifest | None = None,
        content_type: str = JSON,
    ) -> Manifest:
        """Send a request within the limits of its resource."""
        if resource == TOKEN_REVIEWS:
            await self._review_limiter.turn()
            api = self._of_reviews
        else:
            if resource not in UNLIMITED:
                await self._limiter.turn()
            api = self._urgent if is_urgent.get() else self._ordinary
        return await api.request(method, path, timeout=TIMEOUT, params=params, body=body, content_type=content_type)


def _selectors(labels: Labels, fields: Fields) -> dict[str, str]:
    by_label = [f"{key},{key}!=" if value is None else f"{key}={value}" for key, value in sorted(labels.items())]
    by_field = [f"{path}={value}" for path, value in sorted(fields.items())]
    found = {"labelSelector": ",".join(by_label), "fieldSelector": ",".join(by_field)}
    return {name: selector for name, selector in found.items() if selector}


def _event(line: Manifest) -> WatchEvent:
    kind, found = line["type"], line["object"]
    if kind == "ERROR":
        raise refusal(found.get("code", 0), {}, json.dumps(found))
    version = int(found["metadata"]["resourceVersion"])
    return WatchEvent(object=None if kind == "BOOKMARK" else found, version=version, deleted=kind == "DELETED")
