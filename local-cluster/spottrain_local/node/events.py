"""Events about pods, as `kubectl describe` shows them."""

import asyncio
import logging
from datetime import UTC, datetime
from typing import Literal

from spottrain_local.node.api import UNREACHABLE, ApiClient, ApiError, JSONObject

logger = logging.getLogger(__name__)

EventType = Literal["Normal", "Warning"]


def now_text() -> str:
    """Return the current time in the form of API objects."""
    return datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")


class EventRecorder:
    """Writes events in the background.

    A repeated event only counts up. A lost event is not a failure.
    """

    def __init__(self, client: ApiClient, node_name: str) -> None:
        self._client = client
        self._node_name = node_name
        self._queue: asyncio.Queue[tuple[JSONObject, EventType, str, str]] = asyncio.Queue(maxsize=1000)
        self._known: dict[tuple[str, str, str], tuple[str, int]] = {}

    def record(self, pod: JSONObject, kind: EventType, reason: str, message: str) -> None:
        """Record an event about a pod."""
        if not self._queue.full():
            self._queue.put_nowait((pod, kind, reason, message))

    async def run(self) -> None:
        """Write the recorded events, for ever."""
        while True:
            pod, kind, reason, message = await self._queue.get()
            try:
                await self._write(pod, kind, reason, message)
            except (ApiError, *UNREACHABLE) as error:
                logger.info("event %s was lost: %s", reason, error)

    async def _write(self, pod: JSONObject, kind: EventType, reason: str, message: str) -> None:
        metadata = pod["metadata"]
        path = f"/api/v1/namespaces/{metadata['namespace']}/events"
        key = (metadata["uid"], reason, message)
        if key in self._known:
            name, count = self._known[key]
            self._known[key] = (name, count + 1)
            await self._client.patch(f"{path}/{name}", {"count": count + 1, "lastTimestamp": now_text()})
            return
        if len(self._known) > 1000:
            self._known.clear()
        written = await self._client.create(path, self._event(metadata, kind, reason, message))
        self._known[key] = (written["metadata"]["name"], 1)

    def _event(self, metadata: JSONObject, kind: EventType, reason: str, message: str) -> JSONObject:
        now = now_text()
        return {
            "apiVersion": "v1",
            "kind": "Event",
            "metadata": {"generateName": metadata["name"] + ".", "namespace": metadata["namespace"]},
            "involvedObject": {
                "apiVersion": "v1",
                "kind": "Pod",
                "name": metadata["name"],
                "namespace": metadata["namespace"],
                "uid": metadata["uid"],
            },
            "type": kind,
            "reason": reason,
            "message": message[:1000],
            "source": {"component": "kubelet", "host": self._node_name},
            "reportingComponent": "kubelet",
            "reportingInstance": self._node_name,
            "firstTimestamp": now,
            "lastTimestamp": now,
            "count": 1,
        }
