"""The downward API: facts about a pod for its own containers."""

import re
from dataclasses import dataclass

from spottrain_local.node.api import JSONObject
from spottrain_runtime.quantity import divide_quantity

_SUBSCRIPT = re.compile(r"^metadata\.(labels|annotations)\['(.+)'\]$")


@dataclass(frozen=True, slots=True, kw_only=True)
class PodPlace:
    """The addresses and the node of a pod."""

    node_name: str
    pod_ip: str
    host_ip: str
    cpu: str
    memory: str


def field_value(pod: JSONObject, place: PodPlace, path: str) -> str:
    """Return the value of a fieldRef.

    Raises:
        ValueError: The path is not available; the text is a sentence.
    """
    metadata, spec = pod["metadata"], pod["spec"]
    if match := _SUBSCRIPT.match(path):
        return str((metadata.get(match[1]) or {}).get(match[2], ""))
    if path in ("metadata.labels", "metadata.annotations"):
        pairs = metadata.get(path.removeprefix("metadata.")) or {}
        return "\n".join(f'{key}="{_escaped(value)}"' for key, value in sorted(pairs.items()))
    values = {
        "metadata.name": metadata["name"],
        "metadata.namespace": metadata["namespace"],
        "metadata.uid": metadata["uid"],
        "spec.nodeName": place.node_name,
        "spec.serviceAccountName": spec.get("serviceAccountName", "default"),
        "status.hostIP": place.host_ip,
        "status.hostIPs": place.host_ip,
        "status.podIP": place.pod_ip,
        "status.podIPs": place.pod_ip,
    }
    if path not in values:
        raise ValueError(f"The field {path!r} is not available to a pod. Use one of the downward API's fields.")
    return str(values[path])


def _escaped(value: str) -> str:
    return value.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")


def resource_value(container: JSONObject, place: PodPlace, ref: JSONObject) -> str:
    """Return the value of a resourceFieldRef.

    Without a limit, it is the node's capacity.
    """
    kind, _, resource = ref["resource"].partition(".")
    resources = container.get("resources") or {}
    amount = (resources.get(kind) or {}).get(resource)
    if amount is None:
        amount = {"cpu": place.cpu, "memory": place.memory}.get(resource, "0") if kind == "limits" else "0"
    return divide_quantity(str(amount), str(ref.get("divisor") or "1"))
