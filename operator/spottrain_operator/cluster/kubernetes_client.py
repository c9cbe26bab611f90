"""Access to a real cluster through the official Kubernetes client.

Calls run in a limited pool of threads and have timeouts.
"""

from __future__ import annotations

import asyncio
import json
import os
import re
from collections.abc import Callable, Collection, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import kubernetes.client as k8s
import kubernetes.config
import urllib3
from kubernetes.config.incluster_config import InClusterConfigLoader

from spottrain_api.contract import ENV_SERVICEACCOUNT_DIR, GROUP, PLURAL, SERVICEACCOUNT_DIR, VERSION
from spottrain_api.history import HISTORY_PLURAL
from spottrain_operator.cluster.client import (
    AlreadyExistsError,
    ClusterError,
    ConflictError,
    ForbiddenError,
    InvalidObjectError,
    JobKey,
    Manifest,
    PodIdentity,
    TokenIssuer,
    retry_after,
)
from spottrain_operator.cluster.json_text import parsed
from spottrain_operator.cluster.limits import DEFAULT_LIMITS, ClientLimits, RequestLimiter, is_urgent

CONNECT_TIMEOUT_SECONDS = 3.0
READ_TIMEOUT_SECONDS = 15.0
# Requests at once. Urgent ones have threads of their own, so that none waits for the answer to another.
NUM_THREADS = 12
NUM_URGENT_THREADS = 8
# Reviews of tokens have threads, connections and a limit of their own, so that a flood of tokens delays no pass.
NUM_REVIEW_THREADS = 4

EXTRA_POD_NAME = "authentication.kubernetes.io/pod-name"
EXTRA_POD_UID = "authentication.kubernetes.io/pod-uid"
SERVICE_ACCOUNT_PREFIX = "system:serviceaccount:"


def serviceaccount_dir() -> Path | None:
    """Folder of this process' service account, or None outside of a cluster."""
    directory = Path(os.environ.get(ENV_SERVICEACCOUNT_DIR, SERVICEACCOUNT_DIR))
    inside = "KUBERNETES_SERVICE_HOST" in os.environ and (directory / "token").is_file()
    return directory if inside else None


def client_configuration() -> k8s.Configuration:
    """How to reach the API server.

    In a pod, with its service account, whose token is read again as it rotates. Otherwise with the kubeconfig in
    KUBECONFIG (default ~/.kube/config).

    Raises:
        ClusterError: There is neither. The message is a sentence.
    """
    configuration = k8s.Configuration()
    try:
        if (directory := serviceaccount_dir()) is not None:
            loader = InClusterConfigLoader(str(directory / "token"), str(directory / "ca.crt"))
            loader.load_and_set(configuration)
        else:
            kubeconfig = os.environ.get("KUBECONFIG")
            kubernetes.config.load_kube_config(kubeconfig, client_configuration=configuration)
    except kubernetes.config.ConfigException as error:
        raise ClusterError(
            f"no cluster is configured: {error}; run in a pod with a service account, or point KUBECONFIG "
            "at a kubeconfig file"
        ) from error
    configuration.connection_pool_maxsize = NUM_THREADS + NUM_URGENT_THREADS
    configuration.retries = False
    return configuration


# A refusal starts like 'pods "gpt-7" is forbidden: exceeded quota …'. The rest is the same for the next pod.
_NAMED = re.compile(r'^\S+ "[^"]*" is (forbidden|invalid): ')
# Webhooks and policies refuse like this, with any status.
_DENIED = re.compile(r"^(admission webhook|ValidatingAdmissionPolicy) .* denied (the )?request")


class KubernetesCluster:
    """All clients of the operator on a real API server.

    Implements ClusterClient, PodLabelClient, TokenReviewer, IssuerClient, LeaseClient, SecretClient,
    NamespaceClient and HistoryClient.
    """

    def __init__(self, configuration: k8s.Configuration, limits: ClientLimits = DEFAULT_LIMITS) -> None:
        client = k8s.ApiClient(configuration)
        self._core = k8s.CoreV1Api(client)
        self._custom = k8s.CustomObjectsApi(client)
        self._leases = k8s.CoordinationV1Api(client)
        self._networking = k8s.NetworkingV1Api(client)
        of_tokens = k8s.ApiClient(configuration)
        self._reviews = k8s.AuthenticationV1Api(of_tokens)
        self._discovery, self._keys = k8s.WellKnownApi(of_tokens), k8s.OpenidApi(of_tokens)
        self._limiter = RequestLimiter(limits)
        self._review_limiter = RequestLimiter(limits)
        self._threads = ThreadPoolExecutor(NUM_THREADS, thread_name_prefix="kubernetes")
        self._urgent_threads = ThreadPoolExecutor(NUM_URGENT_THREADS, thread_name_prefix="kubernetes-urgent")
        self._review_threads = ThreadPoolExecutor(NUM_REVIEW_THREADS, thread_name_prefix="reviews")

    def close(self) -> None:
        for threads in (self._threads, self._urgent_threads, self._review_threads):
            threads.shutdown(wait=False, cancel_futures=True)

    async def _call(self, method: Callable[..., Any], *args: Any, **kwargs: Any) -> Manifest:
        """Send a request within the limits.

        The lease is renewed without: a leader that can't has to end.
        """
        await self._limiter.turn()
        return await self._send(method, *args, **kwargs)

    async def _send(
        self, method: Callable[..., Any], *args: Any, threads: ThreadPoolExecutor | None = None, **kwargs: Any
    ) -> Manifest:
        def request() -> Manifest:
            timeout = (CONNECT_TIMEOUT_SECONDS, READ_TIMEOUT_SECONDS)
            response = method(*args, _preload_content=False, _request_timeout=timeout, **kwargs)
            answer: Manifest = parsed(response.data)
            return answer

        try:
            threads = threads or (self._urgent_threads if is_urgent.get() else self._threads)
            return await asyncio.get_running_loop().run_in_executor(threads, request)
        except k8s.ApiException as error:
            raise translated(error) from error
        except (urllib3.exceptions.HTTPError, OSError) as error:
            raise ClusterError(f"the API server can't be reached: {error}") from error

    async def get_job(self, key: JobKey) -> Manifest | None:
        return await _found(
            self._call(self._custom.get_namespaced_custom_object, GROUP, VERSION, key.namespace, PLURAL, key.name)
        )

    async def list_jobs(self) -> list[Manifest]:
        answer = await self._call(self._custom.list_cluster_custom_object, GROUP, VERSION, PLURAL)
        return list(answer["items"])

    async def replace_job_status(self, job: Manifest) -> Manifest:
        meta = job["metadata"]
        replace = self._custom.replace_namespaced_custom_object_status
        try:
            return await self._call(replace, GROUP, VERSION, meta["namespace"], PLURAL, meta["name"], job)
        except NotFoundError as error:
            raise ConflictError(str(error)) from error

    async def delete_job(self, key: JobKey, *, uid: str) -> None:
        delete = self._custom.delete_namespaced_custom_object
        body = {"preconditions": {"uid": uid}, "propagationPolicy": "Background"}
        await _gone(self._call(delete, GROUP, VERSION, key.namespace, PLURAL, key.name, body=body))

    async def list_pods(self, namespace: str, *, labels: dict[str, str]) -> list[Manifest]:
        selector = ",".join(f"{key}={value}" for key, value in sorted(labels.items()))
        answer = await self._call(self._core.list_namespaced_pod, namespace, label_selector=selector)
        return list(answer["items"])

    async def create_pod(self, pod: Manifest) -> Manifest:
        return await self._call(self._core.create_namespaced_pod, pod["metadata"]["namespace"], pod)

    async def delete_pod(
        self, namespace: str, name: str, *, uid: str, grace_seconds: int | None = None
    ) -> Manifest | None:
        body: Manifest = {"preconditions": {"uid": uid}}
        if grace_seconds is not None:
            body["gracePeriodSeconds"] = grace_seconds
        return await _gone(self._call(self._core.delete_namespaced_pod, name, namespace, body=body))

    async def annotate_pod(
        self, namespace: str, name: str, *, uid: str, annotations: Mapping[str, str | None]
    ) -> Manifest | None:
        body = {"metadata": {"uid": uid, "annotations": dict(annotations)}}
        try:
            patch, merge = self._core.patch_namespaced_pod, "application/merge-patch+json"
            return await _gone(self._call(patch, name, namespace, body, _content_type=merge))
        except InvalidObjectError as error:
            if not str(error).startswith("metadata.uid:"):  # it can't change: this is another pod
                raise
            return None

    async def label_pod(self, namespace: str, name: str, *, labels: Mapping[str, str | None]) -> None:
        body = {"metadata": {"labels": dict(labels)}}
        patch, merge = self._core.patch_namespaced_pod, "application/merge-patch+json"
        await _gone(self._send(patch, name, namespace, body, _content_type=merge))

    async def get_nodes(self, names: Collection[str]) -> list[Manifest]:
        reads = [_found(self._call(self._core.read_node, name)) for name in sorted(set(names))]
        return [node for node in await asyncio.gather(*reads) if node is not None]

    async def create_event(self, event: Manifest) -> None:
        await self._call(self._core.create_namespaced_event, event["metadata"]["namespace"], event)

    async def events_about(self, namespace: str, *, uid: str) -> list[Manifest]:
        selector = f"involvedObject.uid={uid}"
        answer = await self._call(self._core.list_namespaced_event, namespace, field_selector=selector)
        return sorted(answer["items"], key=_happened_at)

    async def review_token(self, token: str, *, audience: str) -> PodIdentity | None:
        body = {
            "apiVersion": "authentication.k8s.io/v1",
            "kind": "TokenReview",
            "spec": {"token": token, "audiences": [audience]},
        }
        await self._review_limiter.turn()
        answer = await self._send(self._reviews.create_token_review, body, threads=self._review_threads)
        return _pod_identity(answer.get("status", {}), audience)

    async def read_issuer(self) -> TokenIssuer:
        await self._review_limiter.turn()
        discovered = await self._send(
            self._discovery.get_service_account_issuer_open_id_configuration, threads=self._review_threads
        )
        await self._review_limiter.turn()
        keys = await self._send(self._keys.get_service_account_issuer_open_id_keyset, threads=self._review_threads)
        return TokenIssuer(name=discovered.get("issuer", ""), keys=keys)

    async def read_lease(self, namespace: str, name: str) -> Manifest | None:
        return await _found(self._send(self._leases.read_namespaced_lease, name, namespace))

    async def list_leases(self, name: str) -> list[Manifest]:
        selector = f"metadata.name={name}"
        answer = await self._send(self._leases.list_lease_for_all_namespaces, field_selector=selector)
        return list(answer["items"])

    async def write_lease(self, lease: Manifest) -> Manifest:
        create, replace = self._leases.create_namespaced_lease, self._leases.replace_namespaced_lease
        return await self._write(lease, create, replace, self._send)

    async def read_secret(self, namespace: str, name: str) -> Manifest | None:
        return await _found(self._send(self._core.read_namespaced_secret, name, namespace))

    async def write_secret(self, secret: Manifest) -> Manifest:
        create, replace = self._core.create_namespaced_secret, self._core.replace_namespaced_secret
        return await self._write(secret, create, replace, self._send)

    async def create_network_policy(self, policy: Manifest) -> None:
        await self._call(self._networking.create_namespaced_network_policy, policy["metadata"]["namespace"], policy)

    async def get_namespace(self, name: str) -> Manifest | None:
        return await _found(self._call(self._core.read_namespace, name))

    async def read_history(self, key: JobKey) -> Manifest | None:
        get = self._custom.get_namespaced_custom_object
        return await _found(self._call(get, GROUP, VERSION, key.namespace, HISTORY_PLURAL, key.name))

    async def write_history(self, history: Manifest) -> Manifest:
        def create(namespace: str, body: Manifest, **options: Any) -> Any:
            return self._custom.create_namespaced_custom_object(
                GROUP, VERSION, namespace, HISTORY_PLURAL, body, **options
            )

        def replace(name: str, namespace: str, body: Manifest, **options: Any) -> Any:
            return self._custom.replace_namespaced_custom_object(
                GROUP, VERSION, namespace, HISTORY_PLURAL, name, body, **options
            )

        return await self._write(history, create, replace, self._call)

    async def _write(
        self, body: Manifest, create: Callable[..., Any], replace: Callable[..., Any], send: Callable[..., Any]
    ) -> Manifest:
        """Create an object that has no resourceVersion yet; replace one that has.

        Raises:
            ConflictError: Another writer was faster.
        """
        meta = body["metadata"]
        try:
            if "resourceVersion" not in meta:
                answer: Manifest = await send(create, meta["namespace"], body)
            else:
                answer = await send(replace, meta["name"], meta["namespace"], body)
        except (AlreadyExistsError, NotFoundError) as error:
            raise ConflictError(str(error)) from error
        return answer


class NotFoundError(ClusterError):
    """The object doesn't exist."""


def translated(error: k8s.ApiException) -> ClusterError:
    """Translate an error of the client into one of ours.

    The result keeps the API server's own sentence.
    """
    try:
        answer = json.loads(error.body or "{}")
    except ValueError:
        answer = {}
    sentence = answer.get("message") or f"{error.status} {error.reason}"
    said = _NAMED.sub("", sentence)
    if error.status == 403 or "failed calling webhook" in sentence:
        return ForbiddenError(said)
    if error.status in (400, 422) or _DENIED.match(said):
        return InvalidObjectError(said)
    if error.status == 404:
        return NotFoundError(sentence)
    if error.status == 409:
        exists = answer.get("reason") == "AlreadyExists"
        return AlreadyExistsError(sentence) if exists else ConflictError(sentence)
    return ClusterError(
        f"the API server answered {error.status}: {sentence}", retry_after=retry_after(error.headers or {})
    )


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
    """The pod to which a token is bound, from the status of its TokenReview.

    None if it is bound to no pod.
    """
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
