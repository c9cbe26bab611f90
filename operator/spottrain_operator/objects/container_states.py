"""The state of a pod's trainer, and of the container that keeps it from starting."""

from __future__ import annotations

from spottrain_api.contract.conditions import WaitingReason
from spottrain_api.contract.names import TRAINER_CONTAINER
from spottrain_operator.core.model import FAILED_STARTS
from spottrain_operator.kube.resources import Manifest
from spottrain_runtime.wording import counted

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

    The trainer waits for it, or it has failed the pod. The state has the container's name, too, and the end of its
    last run. Empty if there is none.
    """
    state = trainer_status(status).get("state", {})
    if "running" in state or "terminated" in state:
        return {}
    failed = status.get("phase") == "Failed"
    for each in status.get("initContainerStatuses", ()):
        waiting = each.get("state", {}).get("waiting", {})
        if waiting.get("reason") not in _IN_TURN:
            last = each.get("lastState", {}).get("terminated", {})
            return {"name": each["name"], "waiting": waiting | {"message": _why_it_waits(each)}, "terminated": last}
        ended = each.get("state", {}).get("terminated", {})
        if failed and ended.get("exitCode"):
            said = f"container {each['name']}: {ended.get('message', '')}"
            return {"name": each["name"], "terminated": ended | {"message": said}}
    return {}


def _why_it_waits(entry: Manifest) -> str:
    """The cause, with the container's name.

    A kubelet that restarts a container again and again says only for how long it pauses. The cause is in how the
    last run ended.
    """
    name, waiting = entry["name"], entry["state"]["waiting"]
    last = entry.get("lastState", {}).get("terminated", {})
    if waiting["reason"] != WaitingReason.CRASH_LOOP_BACK_OFF or not last:
        return f"container {name}: {waiting.get('message', '')}"
    if last.get("reason") in FAILED_STARTS:
        return f"container {name}: {last.get('message', '')}"
    times = counted(entry.get("restartCount", 0) + 1, "time")
    return f"container {name} has ended {times}, last with exit code {last['exitCode']} ({last.get('reason')})"


def init_container(status: Manifest) -> Manifest:
    """The entry of the init container that runs now, so that the trainer waits.

    They run one after the other, and none is ready before its end. A sidecar is ready once it has started. Empty if
    none runs.
    """
    if trainer_status(status).get("state", {}).keys() & {"running", "terminated"}:
        return {}
    entries = reversed(status.get("initContainerStatuses", ()))
    return next((each for each in entries if "startedAt" in _running(each) and not each.get("ready")), {})


def _running(entry: Manifest) -> Manifest:
    running: Manifest = entry.get("state", {}).get("running", {})
    return running
