"""What the scheduler says of a pod that has no node."""

from __future__ import annotations

import re
from collections.abc import Iterable

from spottrain_api.contract.assignments import CapacityType
from spottrain_api.v1alpha1.spec import TrainingJobSpec
from spottrain_operator.core.model import KeptAway, PodView
from spottrain_runtime.wording import clause, counted

_NO_ROOM = (
    "Lower processesPerNode or resources if no node is that large. Otherwise the pod waits until a node is free "
    "(kubectl describe node shows how full each is)"
)
_ONE_A_NODE = "A job runs one pod a node: add nodes{}, or lower nodes.min to train with fewer"
_FULL_NODES = "Nodes with Insufficient are full with others' pods, or too small: kubectl describe node shows which"
# What is said of a pod of which no scheduler says anything, and of one that is in a PodGroup.
UNSEEN = "no scheduler has looked at it"
INCOMPLETE = "the scheduler waits until as many of the job's pods exist as nodes.min"
# What the scheduler says of a pod of a PodGroup that it has not looked at, or for which there is a node.
_OF_GROUP = "mincount ("
# What the scheduler's message may contain, in lower case, and what to change then. The first that fits counts. The
# scheduler counts a node at the first check that it fails, so the order is that of its checks, from the last one:
# nodes of the other capacity type fail the first, and say nothing about those that the pod may have.
_NOT_OF_NODES = (
    ("resourceclaim", "Create what is missing, or correct podTemplate.resourceClaims"),
    (
        "scheduling gates",
        "Wait until the controller that set the pod's spec.schedulingGates, such as Kueue, removes them",
    ),
    (INCOMPLETE, "See why the others are not created, or start the scheduler that podTemplate.schedulerName names"),
    (_OF_GROUP, "The job gets as many nodes as nodes.min at once, or none: see what its other pods wait for"),
    (UNSEEN, "Start the scheduler that podTemplate.schedulerName names, or correct the name"),
    ("persistentvolumeclaim", "Create and bind the claim, or correct podTemplate.volumes"),
)
_ADVICE = (
    *_NOT_OF_NODES,
    (
        "pod affinity rules",
        "The job's other pods are in a zone without such a node: add nodes there, or change podTemplate.sameZone",
    ),
    ("anti-affinity", _ONE_A_NODE),
    ("insufficient", _NO_ROOM),
)
# The scheduler's words for a device of which no node has enough, or which no node offers.
_DEVICE = re.compile(r"insufficient [^\s,]+/")
_PLAIN = re.compile(r"insufficient (cpu|memory)")
# The scheduler goes on with the pods that it could evict, which a reader takes for spot preemptions.
_EVICTIONS = re.compile(r"[.,]?\s*(no new claims to deallocate,\s*)?preemption: .*$", re.DOTALL)


def scheduler_says(pod: PodView) -> str:
    """The scheduler's sentence about `pod`.

    It comes without its full stop and without what it says of evictions.
    """
    said = clause(_EVICTIONS.sub("", pod.waiting_message or "").strip())
    return said.replace("not found. not found", "not found") or "no node suits it"


def lacks_claim(pod: PodView) -> bool:
    """Whether the pod waits because a claim of its volumes is missing or unbound.

    More nodes don't help it.
    """
    return pod.unschedulable_since is not None and "persistentvolumeclaim" in scheduler_says(pod).lower()


def lacks_more_than_nodes(pod: PodView) -> bool:
    """Whether the pod needs something else before any node suits it."""
    words = scheduler_says(pod).lower()
    return any(kind in words for kind, _ in _NOT_OF_NODES)


def nodes_kept_away(pod: PodView, kept: KeptAway) -> str:
    """Sentences about nodes that are cordoned or tainted; empty if the pod needs something else first."""
    if lacks_more_than_nodes(pod):
        return ""
    keys = f" ({', '.join(sorted(kept.taints))})" if kept.taints else ""
    found = (
        (kept.num_cordoned, "cordoned: kubectl uncordon gives", "back"),
        (kept.num_tainted, f"tainted for others{keys}: podTemplate.tolerations lets the job use", ""),
    )
    kind = f"{pod.capacity_type.value} node"
    return ". ".join(
        f"{counted(num, kind)} {'is' if num == 1 else 'are'} {what} {'it' if num == 1 else 'them'} {end}".strip()
        for num, what, end in found
        if num
    )


def lacks_labelled_node(pod: PodView) -> bool:
    """Whether only the nodes' labels and taints keep `pod` from one."""
    return _known_advice(pod) is None


def _known_advice(pod: PodView) -> str | None:
    words = scheduler_says(pod).lower()
    return next((advice for kind, advice in _ADVICE if kind in words), None)


def scheduler_advice(pod: PodView, spec: TrainingJobSpec, kept: KeptAway, *, had_type: bool, had_node: bool) -> str:
    """What to change so that the scheduler finds a node for `pod`.

    Empty if it lacks only nodes that are kept from it.

    Args:
        pod: A pod without a node.
        spec: Its job's.
        kept: Nodes with the labels that it asks for.
        had_type: Whether the job has last trained, with the same settings, on nodes of the pod's capacity type.
        had_node: Whether a pod of the same template has had a node. Then nodes offer the device.
    """
    advice = _known_advice(pod)
    labels = ", ".join(f"{name}={value}" for name, value in sorted(spec.pod_template.node_selector.items()))
    if advice is None:
        if kept.num_cordoned or kept.num_tainted:
            return ""
        if kept.num_down or had_type:
            return f"No {pod.capacity_type.value} node is up for the pod, which starts when one comes"
        own = f"podTemplate.nodeSelector ({labels}) or " if labels else ""
        where = "capacity.pools" if spec.capacity.pools else "capacity"
        lacking = f"No {pod.capacity_type.value} node has the labels in the pod's nodeSelector and affinity"
        return f"{lacking}: wait for such a node, add one, or correct {own}{where}"
    words = scheduler_says(pod).lower()
    if advice is _ONE_A_NODE:
        more = advice.format(f" that have the labels of podTemplate.nodeSelector ({labels})" if labels else "")
        return f"{more}. {_FULL_NODES}" if "insufficient" in words else more
    if advice is not _NO_ROOM or not _DEVICE.search(words):
        return advice
    device = tuple(_of_device(spec, pod.capacity_type, had_node=had_node))
    # Nodes that lack processors or memory have the device, or lack that as well.
    return ". ".join((advice, *device) if _PLAIN.search(words) else (*device, advice))


def _of_device(spec: TrainingJobSpec, capacity_type: CapacityType, *, had_node: bool) -> Iterable[str]:
    """What the job asks for, and what to do if no node offers it.

    How much nodes offer isn't known here, but that some do if the same pods have had nodes.
    """
    if spec.resources is None:
        num = spec.processes_per_node
        yield f"A pod asks for {num} nvidia.com/gpu, as processesPerNode is {num}"
    if had_node:
        return
    change = "lower" if capacity_type is CapacityType.ON_DEMAND else "raise"
    if spec.resources is None:
        known = f"If no {capacity_type.value} node offers any"
    else:
        known = f"If no {capacity_type.value} node offers this device, correct its name in resources"
    yield f"{known}, install its device plugin, add such a node, or {change} capacity.onDemand.min"
