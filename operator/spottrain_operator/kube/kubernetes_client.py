"""The operator's reads and writes of a real API server, within limits."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Collection, Mapping
from contextlib import AsyncExitStack
from typing import Any

import aiohttp

from spottrain_operator.kube.api_server import MERGE_PATCH, ApiServer
from spottrain_operator.kube.client import TokenIssuer
from spottrain_operator.kube.errors import AlreadyExistsError, ConflictError, InvalidObjectError, NotFoundError
from spottrain_operator.kube.identities import JobKey, PodIdentity
from spottrain_operator.kube.limits import DEFAULT_LIMITS, ClientLimits, RequestLimiter, is_urgent
from spottrain_operator.kube.resources import (
    DEFINITIONS,
    EVENTS,
    HISTORIES,
    JOBS,
    LEASES,
    NAMESPACES,
    NETWORK_POLICIES,
    NODES,
    PODS,
    SECRETS,
    TOKEN_REVIEWS,
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

EXTRA_POD_NAME = "authentication.kubernetes.io/pod-name"
EXTRA_POD_UID = "authentication.kubernetes.io/pod-uid"
SERVICE_ACCOUNT_PREFIX = "system:serviceaccount:"


Send = Callable[..., Awaitable[Manifest]]


class KubernetesCluster:
    """All clients of the operator on a real API server.

    Implements ClusterClient, PodLabelClient, TokenReviewer, IssuerClient, LeaseClient, SecretClient,
    NamespaceClient, DefinitionClient and HistoryClient. Use it as an async context manager.
    """

    def __init__(self, limits: ClientLimits = DEFAULT_LIMITS) -> None:
        self._ordinary = ApiServer(max_connections=NUM_CONNECTIONS)
        self._urgent = ApiServer(max_connections=NUM_URGENT_CONNECTIONS)
        self._of_reviews = ApiServer(max_connections=NUM_REVIEW_CONNECTIONS)
        self._limiter = RequestLimiter(limits)
        self._review_limiter = RequestLimiter(limits)
        self._open = AsyncExitStack()

    async def __aenter__(self) -> KubernetesCluster:
        for api in (self._ordinary, self._urgent, self._of_reviews):
            await self._open.enter_async_context(api)
        return self

    async def __aexit__(self, *error: object) -> None:
        await self._open.aclose()

    async def _call(self, method: str, path: str, body: Manifest | None = None, **options: Any) -> Manifest:
        """Send a request within the limits.

        The lease is renewed without: a leader that can't has to end.
        """
        await self._limiter.turn()
        return await self._send(method, path, body, **options)

    async def _send(self, method: str, path: str, body: Manifest | None = None, **options: Any) -> Manifest:
        api = self._urgent if is_urgent.get() else self._ordinary
        return await api.request(method, path, body=body, timeout=TIMEOUT, **options)

    async def _review(self, method: str, path: str, body: Manifest | None = None) -> Manifest:
        await self._review_limiter.turn()
        return await self._of_reviews.request(method, path, body=body, timeout=TIMEOUT)

    async def get_job(self, key: JobKey) -> Manifest | None:
        return await _found(self._call("GET", JOBS.path(key.namespace, key.name)))

    async def list_jobs(self) -> list[Manifest]:
        answer = await self._call("GET", JOBS.path())
        return list(answer["items"])

    async def replace_job_status(self, job: Manifest) -> Manifest:
        meta = job["metadata"]
        try:
            return await self._call("PUT", f"{JOBS.path(meta['namespace'], meta['name'])}/status", job)
        except NotFoundError as error:
            raise ConflictError(str(error)) from error

    async def delete_job(self, key: JobKey, *, uid: str) -> None:
        body = {"preconditions": {"uid": uid}, "propagationPolicy": "Background"}
        await _gone(self._call("DELETE", JOBS.path(key.namespace, key.name), body))

    async def list_pods(self, namespace: str, *, labels: dict[str, str]) -> list[Manifest]:
        selector = ",".join(f"{key}={value}" for key, value in sorted(labels.items()))
        answer = await self._call("GET", PODS.path(namespace), params={"labelSelector": selector})
        return list(answer["items"])

    async def create_pod(self, pod: Manifest) -> Manifest:
        return await self._call("POST", PODS.path(pod["metadata"]["namespace"]), pod)

    async def delete_pod(
        self, namespace: str, name: str, *, uid: str, grace_seconds: int | None = None
    ) -> Manifest | None:
        body: Manifest = {"preconditions": {"uid": uid}}
        if grace_seconds is not None:
            body["gracePeriodSeconds"] = grace_seconds
        return await _gone(self._call("DELETE", PODS.path(namespace, name), body))

    async def annotate_pod(
        self, namespace: str, name: str, *, uid: str, annotations: Mapping[str, str | None]
    ) -> Manifest | None:
        body = {"metadata": {"uid": uid, "annotations": dict(annotations)}}
        try:
            return await _gone(
                self._call("PATCH", PODS.path(namespace, name), body, content_type=MERGE_PATCH),
            )
        except InvalidObjectError as error:
            if not str(error).startswith("metadata.uid:"):  # it can't change: this is another pod
                raise
            return None

    async def label_pod(self, namespace: str, name: str, *, labels: Mapping[str, str | None]) -> None:
        body = {"metadata": {"labels": dict(labels)}}
        await _gone(self._send("PATCH", PODS.path(namespace, name), body, content_type=MERGE_PATCH))

    async def get_nodes(self, names: Collection[str]) -> list[Manifest]:
        reads = [_found(self._call("GET", NODES.path(name=name))) for name in sorted(set(names))]
        return [node for node in await asyncio.gather(*reads) if node is not None]

    async def create_event(self, event: Manifest) -> None:
        await self._call("POST", EVENTS.path(event["metadata"]["namespace"]), event)

    async def events_about(self, namespace: str, *, uid: str) -> list[Manifest]:
        answer = await self._call(
            "GET", EVENTS.path(namespace), params={"fieldSelector": f"involvedObject.uid={uid}"}
        )
        return sorted(answer["items"], key=_happened_at)

    async def review_token(self, token: str, *, audience: str) -> PodIdentity | None:
        body = {
            "apiVersion": "authentication.k8s.io/v1",
            "kind": "TokenReview",
            "spec": {"token": token, "audiences": [audience]},
        }
        answer = await self._review("POST", TOKEN_REVIEWS.path(), body)
        return _pod_identity(answer.get("status", {}), audience)

    async def read_issuer(self) -> TokenIssuer:
        discovered = await self._review("GET", "/.well-known/openid-configuration")
        keys = await self._review("GET", "/openid/v1/jwks")
        return TokenIssuer(name=discovered.get("issuer", ""), keys=keys)

    async def read_lease(self, namespace: str, name: str) -> Manifest | None:
        return await _found(self._send("GET", LEASES.path(namespace, name)))

    async def list_leases(self, name: str) -> list[Manifest]:
        answer = await self._send("GET", LEASES.path(), params={"fieldSelector": f"metadata.name={name}"})
        return list(answer["items"])

    async def write_lease(self, lease: Manifest) -> Manifest:
        return await self._write(LEASES, lease, self._send)

    async def read_secret(self, namespace: str, name: str) -> Manifest | None:
        return await _found(self._send("GET", SECRETS.path(namespace, name)))

    async def write_secret(self, secret: Manifest) -> Manifest:
        return await self._write(SECRETS, secret, self._send)

    async def create_network_policy(self, policy: Manifest) -> None:
        await self._call("POST", NETWORK_POLICIES.path(policy["metadata"]["namespace"]), policy)

    async def get_namespace(self, name: str) -> Manifest | None:
        return await _found(self._call("GET", NAMESPACES.path(name=name)))

    async def read_definition(self, name: str) -> Manifest | None:
        return await _found(self._call("GET", DEFINITIONS.path(name=name)))

    async def read_history(self, key: JobKey) -> Manifest | None:
        return await _found(self._call("GET", HISTORIES.path(key.namespace, key.name)))

    async def write_history(self, history: Manifest) -> Manifest:
        return await self._write(HISTORIES, history, self._call)

    async def _write(self, resource: Resource, body: Manifest, send: Send) -> Manifest:
        """Create an object that has no resourceVersion yet; replace one that has.

        Raises:
            ConflictError: Another writer was faster.
        """
        meta = body["metadata"]
        try:
            if "resourceVersion" not in meta:
                return await send("POST", resource.path(meta["namespace"]), body)
            return await send("PUT", resource.path(meta["namespace"], meta["name"]), body)
        except (AlreadyExistsError, NotFoundError) as error:
            raise ConflictError(str(error)) from error


def _happened_at(event: Manifest) -> str:
    """Time at which an event was seen last, as text that sorts.

    Repeated events are one object.
    """
    series = event.get("series") or {}
    times = (series.get("lastObservedTime"), event.get("eventTime"), event.get("lastTimestamp"))
    text = next((time for time in times if time), event["metadata"]["creationTimestamp"])
    return str(text).removesuffix("Z")


async def _found(call: Any) -> Manifest | None:
    try:
        found: Manifest = await call
    except NotFoundError:
        return None
    return found


async def _gone(call: Any) -> Manifest | None:
    """The answer, or None if the object is gone.

    A new object of the same name may have replaced it.
    """
    try:
        answer: Manifest = await call
    except (NotFoundError, ConflictError):
        return None
    return answer


def _pod_identity(status: Manifest, audience: str) -> PodIdentity | None:
    """The pod to which a token is bound, from the status of its TokenReview; None if it is bound to no pod."""
    if not status.get("authenticated") or audience not in status.get("audiences", ()):
        return None
    user = status.get("user", {})
    extra: dict[str, list[str]] = user.get("extra") or {}
    names, uids = extra.get(EXTRA_POD_NAME, []), extra.get(EXTRA_POD_UID, [])
    username = user.get("username", "")
    if len(names) != 1 or len(uids) != 1 or not username.startswith(SERVICE_ACCOUNT_PREFIX):
        return None
    namespace = str(username).removeprefix(SERVICE_ACCOUNT_PREFIX).partition(":")[0]
    return PodIdentity(namespace=namespace, pod=names[0], uid=uids[0])
