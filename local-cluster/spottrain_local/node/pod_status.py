"""A pod's status from the records of its containers.

The functions are pure and follow the kubelet's rules.
"""

from collections.abc import Sequence
from typing import Any

from spottrain_local.node.api import JSONObject
from spottrain_local.node.containers import ContainerRecord, ContainerState, Running, Terminated, Waiting
from spottrain_runtime.quantity import parse_quantity

TERMINAL_PHASES = frozenset({"Succeeded", "Failed"})


def compute_status(
    pod: JSONObject,
    records: Sequence[ContainerRecord],
    *,
    pod_ip: str,
    host_ip: str,
    start_time: str,
    now: str,
    final: bool = False,
    failure: tuple[str, str] | None = None,
) -> JSONObject:
    """Return the status that a kubelet would write.

    `final` says that no container will run again, whatever the restart policy. `failure` is a reason and a
    message for a pod that the node itself ended: its phase is Failed. `now` (RFC 3339) is the transition time
    of conditions that change.
    """
    phase = "Failed" if failure and final else pod_phase(pod, records, final=final)
    reason, message = failure or (None, None)
    inits = [r for r in records if r.kind != "main"]
    mains = [r for r in records if r.kind == "main"]
    return {
        "phase": phase,
        "reason": reason,
        "message": message,
        "observedGeneration": pod["metadata"].get("generation"),
        "hostIP": host_ip,
        "hostIPs": [{"ip": host_ip}],
        "podIP": pod_ip or None,
        "podIPs": [{"ip": pod_ip}] if pod_ip else None,
        "startTime": start_time,
        "qosClass": (pod.get("status") or {}).get("qosClass") or qos_class(pod),
        "conditions": _conditions(pod, records, phase, now),
        "initContainerStatuses": [container_status(r) for r in inits] or None,
        "containerStatuses": [container_status(r) for r in mains],
    }


def pod_phase(pod: JSONObject, records: Sequence[ContainerRecord], *, final: bool) -> str:
    """Return the pod's phase.

    It is Pending until all init containers are done and a container has started. After that, the containers decide.
    """
    mains = [r for r in records if r.kind == "main"]
    policy = pod["spec"].get("restartPolicy", "Always")
    ended = [r for r in mains if isinstance(r.state, Terminated)]
    if final:
        unended = len(ended) < len(mains)
        return "Succeeded" if not unended and all(r.succeeded for r in mains) else "Failed"
    if policy != "Always" and _init_failed(policy, records):
        return "Failed"
    if len(ended) == len(mains):
        if policy == "Never":
            return "Succeeded" if all(r.succeeded for r in mains) else "Failed"
        if policy == "OnFailure" and all(r.succeeded for r in mains):
            return "Succeeded"
        return "Running"
    if any(not isinstance(r.state, Waiting) or r.last for r in mains):
        return "Running"
    return "Pending"


def _init_failed(policy: str, records: Sequence[ContainerRecord]) -> bool:
    return policy == "Never" and any(
        r.kind == "init" and isinstance(r.state, Terminated) and not r.succeeded for r in records
    )


def _conditions(pod: JSONObject, records: Sequence[ContainerRecord], phase: str, now: str) -> list[JSONObject]:
    # A different program sets a readiness gate. It counts only if the containers are ready.
    inits = [r for r in records if r.kind != "main"]
    initialized = all(r.succeeded if r.kind == "init" else r.started for r in inits) or phase == "Succeeded"
    unready = [r.name for r in records if r.kind != "init" and not r.ready]
    old = {c["type"]: c for c in (pod.get("status") or {}).get("conditions") or []}
    gates = [g["conditionType"] for g in pod["spec"].get("readinessGates") or []]
    unmet = [g for g in gates if old.get(g, {}).get("status") != "True"]

    def condition(kind: str, holds: bool, reason: str, message: str) -> JSONObject:
        status = "True" if holds else "False"
        same = old.get(kind, {}).get("status") == status
        return {
            "type": kind,
            "status": status,
            "reason": None if holds else reason,
            "message": None if holds else message,
            "lastTransitionTime": old[kind].get("lastTransitionTime", now) if same else now,
        }

    if phase == "Succeeded":
        why, text = "PodCompleted", ""
    elif phase == "Failed":
        why, text = "PodFailed", ""
    else:
        why, text = "ContainersNotReady", f"containers with unready status: [{' '.join(unready)}]"
    ready = not unready and phase == "Running"
    gate_text = f'the readiness gates {", ".join(unmet)} are not "True"'
    incomplete = [r.name for r in inits if not r.succeeded]
    return [
        condition("PodReadyToStartContainers", phase == "Running" or bool(old), "", ""),
        condition(
            "Initialized",
            initialized,
            "ContainersNotInitialized",
            f"containers with incomplete status: [{' '.join(incomplete)}]",
        ),
        condition("ContainersReady", ready, why, text),
        condition("Ready", ready and not unmet, *(("ReadinessGatesNotReady", gate_text) if ready else (why, text))),
    ]


def container_status(record: ContainerRecord) -> JSONObject:
    """Return one entry of containerStatuses."""
    return {
        "name": record.name,
        "image": record.image,
        "imageID": "",
        "containerID": record.container_id or None,
        "ready": record.succeeded if record.kind == "init" else record.ready,
        "started": record.started,
        "restartCount": record.restart_count,
        "state": _state(record.state),
        "lastState": _state(record.last) if record.last else {},
    }


def _state(state: ContainerState) -> JSONObject:
    match state:
        case Waiting(reason=reason, message=message):
            return {"waiting": _without_empty(reason=reason, message=message)}
        case Running(started_at=started_at):
            return {"running": {"startedAt": _seconds(started_at)}}
        case Terminated():
            ended = _without_empty(
                signal=state.signal,
                reason=state.reason,
                message=state.message,
                startedAt=_seconds(state.started_at) if state.started_at else None,
                finishedAt=_seconds(state.finished_at) if state.finished_at else None,
                containerID=state.container_id,
            )
            return {"terminated": {"exitCode": state.exit_code, **ended}}


def parse_state(state: JSONObject) -> ContainerState | None:
    """Parse a state from an API object."""
    if running := state.get("running"):
        return Running(started_at=running.get("startedAt", ""))
    if ended := state.get("terminated"):
        return Terminated(
            exit_code=ended["exitCode"],
            reason=ended.get("reason", ""),
            message=ended.get("message", ""),
            signal=ended.get("signal", 0),
            started_at=ended.get("startedAt") or "",
            finished_at=ended.get("finishedAt") or "",
            container_id=ended.get("containerID", ""),
        )
    if waiting := state.get("waiting"):
        return Waiting(reason=waiting.get("reason", ""), message=waiting.get("message", ""))
    return None


def _seconds(time: str) -> str:
    """Return a time with whole seconds, as API objects have it."""
    return time.partition(".")[0].removesuffix("Z") + "Z"


def _without_empty(**values: Any) -> JSONObject:
    return {key: value for key, value in values.items() if value}


def qos_class(pod: JSONObject) -> str:
    """Return Guaranteed, Burstable or BestEffort.

    The containers' requests and limits of CPU and memory decide.
    """
    containers = (pod["spec"].get("initContainers") or []) + pod["spec"]["containers"]
    amounts = []
    guaranteed = True
    for container in containers:
        resources = container.get("resources") or {}
        limits, requests = resources.get("limits") or {}, resources.get("requests") or {}
        for name in ("cpu", "memory"):
            limit, request = limits.get(name), requests.get(name, limits.get(name))
            amounts += [a for a in (limit, request) if a]
            same = limit and parse_quantity(str(limit)) == parse_quantity(str(request))
            guaranteed = guaranteed and bool(same)
    if not amounts:
        return "BestEffort"
    return "Guaranteed" if guaranteed else "Burstable"
