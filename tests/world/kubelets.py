"""What kubelets write."""

from __future__ import annotations

from datetime import datetime
from typing import Any


def timestamp(time: datetime) -> str:
    """A time, as Kubernetes writes it."""
    return time.isoformat(timespec="seconds").replace("+00:00", "Z")


def running(since: datetime, ip: str = "127.0.0.1") -> dict[str, Any]:
    """The status of a pod whose container runs, and is ready."""
    at = timestamp(since)
    kinds = ("PodScheduled", "Initialized", "ContainersReady", "Ready")
    return {
        "phase": "Running",
        "podIP": ip,
        "startTime": at,
        "conditions": [{"type": kind, "status": "True", "lastTransitionTime": at} for kind in kinds],
        "containerStatuses": [
            {
                **{"name": "trainer", "image": "bench/none", "imageID": "", "restartCount": 0},
                **{"ready": True, "started": True, "state": {"running": {"startedAt": at}}},
            }
        ],
    }
