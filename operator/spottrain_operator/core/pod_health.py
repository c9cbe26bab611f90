"""PodsHealthy: whether the job gets its pods, in the words of whoever refuses them."""

from __future__ import annotations

from spottrain_api.contract import ConditionReason, ConditionType, WaitingReason
from spottrain_operator.core.capacity import missing
from spottrain_operator.core.draft import Draft
from spottrain_operator.core.failure_policy import CANNOT_START, start_sentence
from spottrain_operator.core.model import PodView
from spottrain_operator.core.situation import Situation

_TOO_LARGE = (
    "Lower processesPerNode or resources if no node is that large. Otherwise the pod waits until a node is free"
)
# What the scheduler's message may contain, in lower case, and what to change then.
_ADVICE = (
    ("persistentvolumeclaim", "Create and bind the claim, or correct podTemplate.volumes"),
    (
        "pod affinity rules",
        "The job's other pods are in a zone without such a node: add nodes there, or change podTemplate.sameZone",
    ),
    ("anti-affinity", "A job runs one pod a node: add nodes, or lower nodes.min to train with fewer"),
    ("insufficient", _TOO_LARGE),
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
            ConditionType.PODS_HEALTHY, False, ConditionReason.UNSCHEDULABLE, _no_node(unplaced), now
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


def _no_node(pods: list[PodView]) -> str:
    """The scheduler's message about the first pod, and what to change."""
    more = f" (and {len(pods) - 1} more)" if len(pods) > 1 else ""
    said = (pods[0].waiting_message or "no node suits it").removesuffix(".")
    fitting = [advice for words, advice in _ADVICE if words in said.lower()]
    return f"pod {pods[0].name}{more} has no node: {said}. {'. '.join(fitting) or _TOO_LARGE}"
