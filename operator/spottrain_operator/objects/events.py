"""Events of a job, as `kubectl describe` shows them, without repetitions."""

from __future__ import annotations

import logging
import os
import time
from collections import OrderedDict
from datetime import UTC, datetime
from uuid import uuid4

from spottrain_api.contract.names import API_VERSION, KIND
from spottrain_operator.core.model import Event
from spottrain_operator.kube.cluster import Cluster
from spottrain_operator.kube.errors import ClusterError
from spottrain_operator.kube.resources import EVENTS, Manifest
from spottrain_runtime.wording import one_line

logger = logging.getLogger(__name__)

COMPONENT = "spottrain-operator"
REPEAT_SECONDS = 300.0
MAX_REMEMBERED = 5000
# The API server's limit is 1024 bytes.
MAX_MESSAGE_BYTES = 1000


class EventRecorder:
    """Writes events to the API server, without frequent repeats.

    It leaves out an event that it wrote for the same job within the last five minutes. One that can't be written is
    in the operator's log alone, because no decision depends on it.
    """

    def __init__(self, cluster: Cluster) -> None:
        self._cluster = cluster
        self._written: OrderedDict[tuple[str, Event], float] = OrderedDict()

    async def record(self, job: Manifest, event: Event) -> None:
        key = (job["metadata"]["uid"], event)
        if time.monotonic() - self._written.get(key, float("-inf")) < REPEAT_SECONDS:
            return
        level = logging.WARNING if event.type == "Warning" else logging.INFO
        logger.log(level, "%s: %s: %s", job["metadata"]["name"], event.reason, one_line(event.message, most=1000))
        try:
            await self._cluster.create(EVENTS, _manifest(job, event))
        except ClusterError as error:  # as in a namespace that is being deleted
            logger.warning("%s: the event %s is in this log alone: %s", job["metadata"]["name"], event.reason, error)
        self._written[key] = time.monotonic()
        if len(self._written) > MAX_REMEMBERED:
            self._written.popitem(last=False)


def _manifest(job: Manifest, event: Event) -> Manifest:
    """Manifest of the event.

    Its name begins with the time, because kubectl sorts by whole seconds, and by name within a second.
    """
    meta = job["metadata"]
    now = datetime.now(UTC).isoformat(timespec="microseconds").replace("+00:00", "Z")
    instance = os.environ.get("POD_NAME", COMPONENT)
    return {
        "apiVersion": "v1",
        "kind": "Event",
        "metadata": {"namespace": meta["namespace"], "name": f"{meta['name']}.{time.time_ns():x}{uuid4().hex[:4]}"},
        "involvedObject": {
            "apiVersion": API_VERSION,
            "kind": KIND,
            "namespace": meta["namespace"],
            "name": meta["name"],
            "uid": meta["uid"],
        },
        "type": event.type,
        "reason": event.reason,
        "action": event.reason,
        "message": one_line(event.message, most=MAX_MESSAGE_BYTES)
        .encode()[:MAX_MESSAGE_BYTES]
        .decode(errors="ignore"),
        "eventTime": now,
        "firstTimestamp": now[:19] + "Z",
        "lastTimestamp": now[:19] + "Z",
        "count": 1,
        "source": {"component": COMPONENT},
        "reportingComponent": f"spottrain.dev/{COMPONENT}",
        "reportingInstance": instance,
    }


async def events_about(cluster: Cluster, namespace: str, *, uid: str) -> list[Manifest]:
    """The events about the object with this uid, the newest last."""
    found = await cluster.list(EVENTS, namespace=namespace, fields={"involvedObject.uid": uid})
    return sorted(found.items, key=_happened_at)


def _happened_at(event: Manifest) -> str:
    """Time at which an event was seen last, as text that sorts.

    Repeated events are one object.
    """
    series = event.get("series") or {}
    times = (series.get("lastObservedTime"), event.get("eventTime"), event.get("lastTimestamp"))
    text = next((time for time in times if time), event["metadata"]["creationTimestamp"])
    return str(text).removesuffix("Z")
