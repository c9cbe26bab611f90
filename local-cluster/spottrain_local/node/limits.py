"""What a container may do and use: securityContext and resources of a pod's spec."""

from dataclasses import dataclass

from spottrain_local.node.api import JSONObject
from spottrain_runtime.quantity import parse_quantity


@dataclass(frozen=True, slots=True, kw_only=True)
class ContainerLimits:
    """User, rights and amounts of a container.

    None means the image's user, and no limit.
    """

    user: int | None = None
    group: int | None = None
    groups: tuple[int, ...] = ()
    non_root: bool = False
    privileged: bool = False
    escalation: bool = True
    read_only_root: bool = False
    added_capabilities: tuple[str, ...] = ()
    dropped_capabilities: tuple[str, ...] = ()
    memory_bytes: int | None = None
    cpus: float | None = None


def container_limits(pod: JSONObject, container: JSONObject) -> ContainerLimits:
    """Parse the limits of a container. Its own securityContext overrides the pod's."""
    shared, own = pod["spec"].get("securityContext") or {}, container.get("securityContext") or {}
    both = shared | own
    capabilities = own.get("capabilities") or {}
    amounts = (container.get("resources") or {}).get("limits") or {}
    groups = [*(shared.get("supplementalGroups") or []), *([fs_group] if (fs_group := pod_group(pod)) else [])]
    return ContainerLimits(
        user=both.get("runAsUser"),
        group=both.get("runAsGroup"),
        groups=tuple(dict.fromkeys(groups)),
        non_root=bool(both.get("runAsNonRoot")),
        privileged=bool(own.get("privileged")),
        escalation=own.get("allowPrivilegeEscalation") is not False,
        read_only_root=bool(own.get("readOnlyRootFilesystem")),
        added_capabilities=tuple(capabilities.get("add") or ()),
        dropped_capabilities=tuple(capabilities.get("drop") or ()),
        memory_bytes=int(parse_quantity(str(amounts["memory"]))) if "memory" in amounts else None,
        cpus=float(parse_quantity(str(amounts["cpu"]))) if "cpu" in amounts else None,
    )


def pod_group(pod: JSONObject) -> int | None:
    """Return the group to which the pod's volumes belong (fsGroup)."""
    group: int | None = (pod["spec"].get("securityContext") or {}).get("fsGroup")
    return group
