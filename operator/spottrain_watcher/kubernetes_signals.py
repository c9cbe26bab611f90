"""Signals of Kubernetes about a node and the trainer pods on it.

They are taints, labels and the deletion of the node, and disruptions of the pods.

The taints `node.kubernetes.io/not-ready` and `…/unreachable` are left out. They report what has happened already,
they come and go with a restart of the kubelet, and the operator sees them itself.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Callable, Mapping
from datetime import UTC, datetime, timedelta
from typing import Any

from spottrain_api.contract.names import LABEL_MANAGED_BY, MANAGED_BY
from spottrain_api.contract.nodes import (
    DEFAULT_GRACE_SECONDS,
    END_OF_LIFE_LEAD_SECONDS,
    LONGEST_LIFE_SECONDS,
    NODE_DELETION_LEAD_SECONDS,
    TAINTS,
    MarkMeaning,
    accepted_taints,
    announcing_labels,
    eviction_grace_seconds,
)
from spottrain_api.contract.notices import POD_NOTICE_PREFIX, Notice, NoticeKind
from spottrain_runtime.wording import one_line
from spottrain_watcher.kubernetes_api import KubernetesApi, KubernetesError
from spottrain_watcher.ledger import merged

logger = logging.getLogger(__name__)

NODES = "/api/v1/nodes"
PODS = "/api/v1/pods"
RETRY_SECONDS = 1.0
# Nothing can be added to a time near the ends of what a datetime holds.
_YEARS = range(1970, 9000)


class KubernetesSource:
    """Watches this node and the trainer pods on it through the API server."""

    name = "kubernetes"

    def __init__(self, api: KubernetesApi, node: Mapping[str, Any]) -> None:
        """Configure the source.

        Args:
            api: For the requests.
            node: The Node, as it was read last.
        """
        self._api = api
        self._node = node
        self._name: str = node["metadata"]["name"]
        self._troubles = {path: f"The API server has not listed {path} yet." for path in (NODES, PODS)}

    @property
    def node(self) -> Mapping[str, Any]:
        """The newest Node, also after its deletion: the machine may run on for a while."""
        return self._node

    @property
    def trouble(self) -> str | None:
        """Why the source hears nothing at present, as a sentence; None while its endpoint answers."""
        return next(iter(self._troubles.values()), None)

    @property
    def starting(self) -> bool:
        """Never: an API server that takes its time is trouble."""
        return False

    async def watch(self) -> AsyncIterator[tuple[Notice, ...]]:
        objects = _Observed()
        node_field = f"metadata.name={self._name}"
        pod_field = f"spec.nodeName={self._name}"
        label = f"{LABEL_MANAGED_BY}={MANAGED_BY}"
        tasks = [
            asyncio.create_task(self._follow(NODES, objects.set_node, fieldSelector=node_field)),
            asyncio.create_task(self._follow(PODS, objects.set_pods, fieldSelector=pod_field, labelSelector=label)),
        ]
        try:
            async for notices in self._notices(objects):
                yield notices
        finally:
            for task in tasks:
                task.cancel()

    async def _notices(self, objects: _Observed) -> AsyncIterator[tuple[Notice, ...]]:
        known: dict[str, Notice] = {}
        reported: tuple[str, tuple[Notice, ...]] | None = None
        while True:
            await objects.changed.wait()
            objects.changed.clear()
            if objects.node is None or objects.pods is None:
                continue
            now = datetime.now(UTC)
            self._node = next(iter(objects.node.values()), self._node)
            labels = labels_of(self._node)
            seen = [*node_notices(self._name, objects.node, now), *pod_notices(self._name, labels, objects.pods, now)]
            known = {notice.id: merged(known.get(notice.id), notice) for notice in seen}
            notices = tuple(known.values())
            # A Node that is registered anew has no mark. Between two lists, nothing else shows that it was gone.
            news = (self._node["metadata"]["uid"], notices)
            if news != reported:
                reported = news
                yield notices

    async def _follow(self, path: str, on_objects: Callable[[dict[str, Any]], None], **selectors: str) -> None:
        """List, then watch, for ever.

        `on_objects` gets all objects by uid after each change.
        """
        while True:
            try:
                listed = await self._api.get(path, **selectors)
                self._troubles.pop(path, None)
                objects = {item["metadata"]["uid"]: item for item in listed["items"]}
                on_objects(objects)
                version = listed["metadata"]["resourceVersion"]
                async for event in self._api.watch(path, version, **selectors):
                    _apply(objects, event)
                    on_objects(objects)
            except (KubernetesError, LookupError, TypeError, AttributeError) as error:  # the others: not such a list
                logger.debug("%r", error)
                self._troubles[path] = f"The API server gives no usable answer to {path}: {error}."
                await asyncio.sleep(RETRY_SECONDS)


class _Observed:
    """The newest node and pods by uid; None until they are listed.

    Pods of different namespaces may have the same name.
    """

    def __init__(self) -> None:
        self.node: dict[str, Any] | None = None
        self.pods: dict[str, Any] | None = None
        self.changed = asyncio.Event()

    def set_node(self, objects: dict[str, Any]) -> None:
        self.node = objects
        self.changed.set()

    def set_pods(self, objects: dict[str, Any]) -> None:
        self.pods = objects
        self.changed.set()


def _apply(objects: dict[str, Any], event: dict[str, Any]) -> None:
    if event["type"] == "ERROR":
        # Usually 410 Gone: the version is too old to watch from, so list again.
        raise KubernetesError(f"watch ended: {event['object'].get('message')}", event["object"].get("code"))
    uid = event["object"]["metadata"]["uid"]
    if event["type"] == "DELETED":
        objects.pop(uid, None)
    elif event["type"] in ("ADDED", "MODIFIED"):
        objects[uid] = event["object"]


def labels_of(node: Mapping[str, Any]) -> Mapping[str, str]:
    """The labels of a Node."""
    return node["metadata"].get("labels") or {}


def node_notices(name: str, nodes: dict[str, Any], now: datetime) -> list[Notice]:
    """Notices from the Node object: its taints and labels, its deletion, and the end of its life."""
    node = next(iter(nodes.values()), None)
    if node is None:
        return [_deletion(name, now, 0, now)]
    notices = []
    if (deleted_at := node["metadata"].get("deletionTimestamp")) is not None:
        notices.append(_deletion(name, _time(deleted_at, now), NODE_DELETION_LEAD_SECONDS, now))
    labels = labels_of(node)

    def announce(source: str, meaning: MarkMeaning, since: datetime) -> None:
        notices.append(_notice(name, source, source, meaning.kind, since, meaning.lead_on(labels), now))

    for taint in accepted_taints(node):
        if taint["key"] in TAINTS:
            announce(f"taint:{taint['key']}", TAINTS[taint["key"]], _time(taint.get("timeAdded"), now))
    for label, meaning in announcing_labels(labels).items():
        announce(f"label:{label}", meaning, now)  # a label has no time: the first sighting counts
    born = _time(node["metadata"].get("creationTimestamp"), now)
    for label, seconds in LONGEST_LIFE_SECONDS.items():
        # A node that has outlived it is a machine that was started anew for the same Node.
        if labels.get(label) == "true" and 0 <= _seconds_left(born, seconds, now) <= END_OF_LIFE_LEAD_SECONDS:
            source = f"lifetime:{label}"
            notices.append(_notice(name, source, source, NoticeKind.REBALANCE, born, seconds, now))
    return notices


def _seconds_left(since: datetime, seconds: float, now: datetime) -> float:
    return seconds - (now - since).total_seconds()


def pod_notices(node: str, labels: Mapping[str, str], pods: dict[str, Any], now: datetime) -> list[Notice]:
    """Notices from the DisruptionTarget conditions of trainer pods.

    Each concerns its pod alone.
    """
    notices = []
    for pod in pods.values():
        for condition in pod.get("status", {}).get("conditions") or ():
            if condition["type"] == "DisruptionTarget" and condition["status"] == "True":
                since = _time(condition.get("lastTransitionTime"), now)
                lead = _pods_lead(pod, condition, labels, since)
                source = f"condition:{one_line(condition.get('reason') or 'DisruptionTarget', most=60)}"
                notice_id = f"{POD_NOTICE_PREFIX}{pod['metadata']['uid']}"
                notices.append(_notice(node, notice_id, source, NoticeKind.EVICT, since, lead, now))
    return notices


def _pods_lead(pod: dict[str, Any], condition: dict[str, Any], labels: Mapping[str, str], since: datetime) -> float:
    """Seconds from `since` until the pod is killed.

    The shortest of the known times counts.
    """
    asked = float(pod["spec"].get("terminationGracePeriodSeconds", DEFAULT_GRACE_SECONDS))
    grace = eviction_grace_seconds(asked, condition.get("reason"), labels)
    killed_at = _time(pod["metadata"].get("deletionTimestamp"), since + timedelta(seconds=grace))
    return min(grace, (killed_at - since).total_seconds())


def _deletion(node: str, since: datetime, lead_seconds: float, now: datetime) -> Notice:
    return _notice(node, "node-deleted", "node-deleted", NoticeKind.PREEMPT, since, lead_seconds, now)


def _notice(
    node: str, notice_id: str, source: str, kind: NoticeKind, since: datetime, lead_seconds: float, now: datetime
) -> Notice:
    return Notice(
        id=notice_id,
        node=node,
        kind=kind,
        source=source,
        deadline=since + timedelta(seconds=lead_seconds),
        observed_at=now,
    )


def _time(value: str | None, default: datetime) -> datetime:
    try:
        time = datetime.fromisoformat(value) if value else default
    except (ValueError, TypeError):
        return default
    return time if time.tzinfo is not None and time.year in _YEARS else default
