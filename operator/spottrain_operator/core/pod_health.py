"""PodsHealthy: whether the job gets its pods, in the words of whoever refuses them."""

from __future__ import annotations

from spottrain_api.contract import CapacityType, ConditionReason, ConditionType, WaitingReason
from spottrain_api.wording import counted
from spottrain_operator.core.capacity import may_fall_back, missing, spot_sentence
from spottrain_operator.core.draft import Draft
from spottrain_operator.core.failure_policy import CANNOT_START, start_sentence
from spottrain_operator.core.model import PodView
from spottrain_operator.core.scheduling import lacks_claim, scheduler_says
from spottrain_operator.core.situation import Situation

_NO_SUCH_NODE = "No node has the labels that the pod asks for: add such a node, or correct capacity"
# What the scheduler's message may contain, in lower case, and what to change then. The first that fits counts. The
# scheduler counts a node at the first check that it fails, so the order is that of its checks, from the last one:
# nodes of the other capacity type fail the first, and say nothing about those that the pod may have.
_ADVICE = (
    ("persistentvolumeclaim", "Create and bind the claim, or correct podTemplate.volumes"),
    (
        "pod affinity rules",
        "The job's other pods are in a zone without such a node: add nodes there, or change podTemplate.sameZone",
    ),
    ("anti-affinity", "A job runs one pod a node: add nodes, or lower nodes.min to train with fewer"),
    (
        "insufficient",
        "Lower processesPerNode or resources if no node is that large. Otherwise the pod waits until a node is free",
    ),
)


def heed_pods(situation: Situation, draft: Draft) -> Draft:
    """False while a pod that the job lacks can't be created, placed or started.

    A finished job keeps its last condition.
    """
    if draft.finished:
        return draft
    refusal, now = situation.refusal, situation.now
    if refusal is not None and missing(situation, draft):
        message = f"{refusal.message}. The operator retries; existing pods continue"
        return draft.condition(ConditionType.PODS_HEALTHY, False, ConditionReason.PODS_REFUSED, message, now)
    waiting = [facts.pod for facts in situation.pods.values() if not facts.pod.deleting]
    cannot_start = next((pod for pod in waiting if pod.waiting_reason in CANNOT_START), None)
    if cannot_start is not None:
        return _heed_container(situation, draft, cannot_start)
    unplaced = [pod for pod in waiting if pod.unschedulable_since is not None]
    if unplaced:
        return draft.condition(
            ConditionType.PODS_HEALTHY,
            False,
            ConditionReason.UNSCHEDULABLE,
            _no_node(situation, draft, unplaced),
            now,
        )
    return draft.condition(
        ConditionType.PODS_HEALTHY, True, ConditionReason.HEALTHY, "No pod is kept from starting", now
    )


def _heed_container(situation: Situation, draft: Draft, pod: PodView) -> Draft:
    """False with the kubelet's reason. An event reports the start."""
    reason, message = WaitingReason(str(pod.waiting_reason)), start_sentence(pod)
    known = draft.status.condition(ConditionType.PODS_HEALTHY)
    if known is None or known.reason not in CANNOT_START:
        draft = draft.record(reason, message, warning=True)
    return draft.condition(ConditionType.PODS_HEALTHY, False, reason, message, situation.now)


def _no_node(situation: Situation, draft: Draft, pods: list[PodView]) -> str:
    """The scheduler's message about the first pod, and what to change."""
    pod = pods[0]
    more = f" (and {len(pods) - 1} more)" if len(pods) > 1 else ""
    said = scheduler_says(pod)
    node = "node" if lacks_claim(pod) else f"{pod.capacity_type.value} node"
    return f"pod {pod.name}{more} has no {node}: {said}. {_what_to_do(situation, draft, pod, said)}"


def _what_to_do(situation: Situation, draft: Draft, pod: PodView, said: str) -> str:
    words = said.lower()
    advice = next((advice for kind, advice in _ADVICE if kind in words), _NO_SUCH_NODE)
    if lacks_claim(pod):
        return advice
    if draft.running is not None:
        nodes = counted(len(draft.running.members), "node")
        return f"Training continues on {nodes}, and the pod joins it once a node is free"
    spot = spot_sentence(situation, draft) if pod.capacity_type is CapacityType.SPOT else ""
    if not spot:
        return advice
    spot = f"{spot[0].upper()}{spot[1:]}"
    return f"{advice}. {spot}" if "insufficient" in words or not may_fall_back(situation.spec) else spot
