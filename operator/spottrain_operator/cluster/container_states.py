"""The state of a pod's trainer, and of the container that keeps it from starting."""

from __future__ import annotations

from spottrain_api.contract import TRAINER_CONTAINER
from spottrain_operator.cluster.client import Manifest

# What a kubelet says of containers that it has not come to yet.
_IN_TURN = frozenset({None, "ContainerCreating", "PodInitializing"})


def trainer_status(status: Manifest) -> Manifest:
    """The trainer's entry of the pod's status.

    An admission webhook may have added containers.
    """
    entries = status.get("containerStatuses", ())
    return next((each for each in entries if each.get("name", TRAINER_CONTAINER) == TRAINER_CONTAINER), {})


def state_beside(status: Manifest) -> Manifest:
    """State of the init container or sidecar that keeps the trainer from starting.

    The trainer waits for it, or it has failed the pod. The state has the container's name, too. Empty if there is
    none.
    """
    state = trainer_status(status).get("state", {})
    if "running" in state or "terminated" in state:
        return {}
    failed = status.get("phase") == "Failed"
    for each in status.get("initContainerStatuses", ()):
        waiting = each.get("state", {}).get("waiting", {})
        if waiting.get("reason") not in _IN_TURN:
            said = f"container {each['name']}: {waiting.get('message', '')}"
            return {"name": each["name"], "waiting": waiting | {"message": said}}
        ended = each.get("state", {}).get("terminated", {})
        if failed and ended.get("exitCode"):
            return {"name": each["name"], "terminated": ended}
    return {}
