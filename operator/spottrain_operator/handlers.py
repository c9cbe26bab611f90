"""kopf's part: watch jobs, pods and nodes, and wake jobs.

An event wakes the jobs that it concerns. The handlers decide nothing and keep nothing. An event that is lost,
repeated or late costs time at most, because every pass reads afresh and requests the next one.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from datetime import UTC, datetime, timedelta
from typing import Any

import kopf

from spottrain_api.contract import GROUP, LABEL_JOB, LABEL_MANAGED_BY, MANAGED_BY, PLURAL, VERSION
from spottrain_operator.cluster.client import JobKey
from spottrain_operator.cluster.kubernetes_client import serviceaccount_dir
from spottrain_operator.controller import Controller

# The inactivity timeout finds a watch that died silently: the server sends a bookmark every minute.
WATCH_SERVER_SECONDS = 300
WATCH_CLIENT_SECONDS = 330
WATCH_INACTIVITY_SECONDS = 70
CONNECT_SECONDS = 5
REQUEST_SECONDS = 30
# The kubelet renews a pod's token long before it expires. Each login reads the new one.
LOGIN_MINUTES = 10


def build_registry(controller: Controller, watched_by_node: NodeIndex) -> kopf.OperatorRegistry:
    """The event handlers, which only wake jobs."""
    registry = kopf.OperatorRegistry()

    @kopf.on.event(GROUP, VERSION, PLURAL, registry=registry)
    async def job_event(namespace: str | None, name: str | None, **_: Any) -> None:
        controller.wake(JobKey(namespace=namespace or "", name=name or ""))

    @kopf.on.event("v1", "pods", labels={LABEL_MANAGED_BY: MANAGED_BY, LABEL_JOB: kopf.PRESENT}, registry=registry)
    async def pod_event(namespace: str | None, body: Mapping[str, Any], type: str | None, **_: Any) -> None:
        job = JobKey(namespace=namespace or "", name=body["metadata"]["labels"][LABEL_JOB])
        node = body.get("spec", {}).get("nodeName")
        watched_by_node.pod_seen(body["metadata"]["uid"], None if type == "DELETED" else node, job)
        controller.wake(job)

    @kopf.on.event("v1", "nodes", registry=registry)
    async def node_event(name: str | None, **_: Any) -> None:
        for job in watched_by_node.jobs_on(name or ""):
            controller.wake(job)

    @kopf.on.login(registry=registry)
    def login(**kwargs: Any) -> kopf.ConnectionInfo | None:
        return connection_info(**kwargs)

    return registry


class NodeIndex:
    """Which jobs have a pod on a node, as far as events have shown.

    Nodes change often, and jobs care about few.
    """

    def __init__(self) -> None:
        self._pods: dict[str, tuple[str, JobKey]] = {}  # by pod uid
        self._by_node: dict[str, set[str]] = {}

    def pod_seen(self, uid: str, node: str | None, job: JobKey) -> None:
        previous = self._pods.pop(uid, None)
        if previous is not None:
            pods = self._by_node[previous[0]]
            pods.discard(uid)
            if not pods:
                del self._by_node[previous[0]]
        if node is not None:
            self._pods[uid] = (node, job)
            self._by_node.setdefault(node, set()).add(uid)

    def jobs_on(self, node: str) -> set[JobKey]:
        return {self._pods[uid][1] for uid in self._by_node.get(node, ())}


def build_settings() -> kopf.OperatorSettings:
    """Settings of kopf, with a limit on every wait.

    kopf adds no finalizers, annotations or events of its own.
    """
    settings = kopf.OperatorSettings()
    settings.posting.enabled = False
    settings.peering.standalone = True
    settings.watching.server_timeout = WATCH_SERVER_SECONDS
    settings.watching.client_timeout = WATCH_CLIENT_SECONDS
    settings.watching.inactivity_timeout = WATCH_INACTIVITY_SECONDS
    settings.watching.connect_timeout = CONNECT_SECONDS
    settings.networking.request_timeout = REQUEST_SECONDS
    settings.networking.connect_timeout = CONNECT_SECONDS
    return settings


def connection_info(**kwargs: Any) -> kopf.ConnectionInfo | None:
    """Credentials for kopf's own connections.

    They are the same as those of `kubernetes_client.client_configuration`.
    """
    directory = serviceaccount_dir()
    if directory is None:
        return kopf.login_with_kubeconfig(**kwargs)
    host, port = os.environ["KUBERNETES_SERVICE_HOST"], os.environ.get("KUBERNETES_SERVICE_PORT", "443")
    return kopf.ConnectionInfo(
        server=f"https://[{host}]:{port}" if ":" in host else f"https://{host}:{port}",
        ca_path=directory / "ca.crt",
        scheme="Bearer",
        token=(directory / "token").read_text().strip(),
        expiration=datetime.now(UTC) + timedelta(minutes=LOGIN_MINUTES),
    )
