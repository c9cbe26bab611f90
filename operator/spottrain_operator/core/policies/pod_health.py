"""PodsHealthy: whether the job gets its pods.

If not, the message has the words of whoever refuses them.
"""

from __future__ import annotations

from spottrain_api.contract.assignments import CapacityType
from spottrain_api.contract.conditions import ConditionReason, ConditionType, EndReason, EventReason, WaitingReason
from spottrain_operator.core.draft import Draft
from spottrain_operator.core.facts.places import places
from spottrain_operator.core.facts.situation import Situation
from spottrain_operator.core.model import CANNOT_START, PodView
from spottrain_operator.core.policies.capacity import advice, missing, refusal_of, retries_sentence, spot_sentence
from spottrain_operator.core.policies.failure_policy import start_failures
from spottrain_operator.core.timing import after
from spottrain_operator.core.words.pods import ended_early_sentence, start_sentence, waits_in_vain_sentence
from spottrain_operator.core.words.scheduling import lacks_more_than_nodes, scheduler_says
from spottrain_runtime.wording import counted, time_of_day


def handle_pods(situation: Situation, draft: Draft) -> Draft:
    """False while a pod that the job lacks can't be created, placed or started.

    The same while such pods end early, or their node goes. A finished job lacks none. If it could not start, the
    condition keeps the reason.
    """
    if draft.finished:
        return _of_finished(situation, draft)
    refusal, now = refusal_of(situation, draft), situation.now
    if refusal is not None:
        message = f"{refusal.message}. {retries_sentence(situation.timing)}; existing pods continue"
        return draft.condition(ConditionType.PODS_HEALTHY, False, ConditionReason.PODS_REFUSED, message, now)
    goes = draft.leaving
    waiting = [facts.pod for uid, facts in situation.pods.items() if not facts.pod.deleting and uid not in goes]
    cannot_start = next((pod for pod in waiting if pod.waiting_reason in CANNOT_START), None)
    if cannot_start is not None:
        return _handle_container(situation, draft, cannot_start)
    unplaced = [pod for pod in waiting if pod.unschedulable_since is not None]
    if unplaced:
        return draft.condition(
            ConditionType.PODS_HEALTHY,
            False,
            ConditionReason.UNSCHEDULABLE,
            _no_node(situation, draft, unplaced),
            now,
        )
    ended = [facts.pod for facts in start_failures(situation, draft)]
    early = {pod.uid for pod in ended}
    starting = any(not pod.container_started for pod in waiting if pod.uid not in early)
    if ended and (starting or missing(situation, draft)):
        return _handle_early_ends(situation, draft, ended)
    if in_vain := loss_of_place(situation, draft):
        return draft.condition(ConditionType.PODS_HEALTHY, False, ConditionReason.NODE_GOES, in_vain, now)
    return draft.condition(
        ConditionType.PODS_HEALTHY, True, ConditionReason.HEALTHY, "No pod is kept from starting", now
    )


def loss_of_place(situation: Situation, draft: Draft) -> str:
    """The sentence on the first pod that waits in vain; empty if there is none.

    Pods that are deleted now don't count.
    """
    for uid, facts in situation.pods.items():
        if facts.waits_in_vain and uid not in draft.leaving:
            loss = facts.coming_loss.message if facts.coming_loss is not None else ""
            until = after(facts.pod.placed_at, situation.timing.stuck_start)
            return waits_in_vain_sentence(facts.pod, loss, until=time_of_day(until, situation.now))
    return ""


def _of_finished(situation: Situation, draft: Draft) -> Draft:
    known, failed = draft.status.condition(ConditionType.PODS_HEALTHY), draft.status.condition(ConditionType.FAILED)
    if known is None:
        return draft
    if failed is None or failed.reason != EndReason.CANNOT_START:
        return draft.condition(
            ConditionType.PODS_HEALTHY,
            True,
            ConditionReason.FINISHED,
            "The job is over, and needs no pod",
            situation.now,
        )
    if known.reason == ConditionReason.PODS_REFUSED:  # its message said that the operator retries
        return draft.condition(
            ConditionType.PODS_HEALTHY, False, ConditionReason.PODS_REFUSED, failed.message, situation.now
        )
    return draft


def _handle_container(situation: Situation, draft: Draft, pod: PodView) -> Draft:
    """False with the kubelet's reason. An event reports the start."""
    reason, message = WaitingReason(str(pod.waiting_reason)), start_sentence(situation.observed.job.namespace, pod)
    known = draft.status.condition(ConditionType.PODS_HEALTHY)
    if known is None or known.reason not in CANNOT_START:
        draft = draft.record(reason, message, warning=True)
    return draft.condition(ConditionType.PODS_HEALTHY, False, reason, message, situation.now)


def _handle_early_ends(situation: Situation, draft: Draft, pods: list[PodView]) -> Draft:
    """False with what is known of the last of `pods`. An event reports the start."""
    message = ended_early_sentence(situation.observed.job.namespace, pods)
    known = draft.status.condition(ConditionType.PODS_HEALTHY)
    if known is None or known.reason != EventReason.PODS_END_EARLY:
        draft = draft.record(EventReason.PODS_END_EARLY, message, warning=True)
    return draft.condition(ConditionType.PODS_HEALTHY, False, EventReason.PODS_END_EARLY, message, situation.now)


def _no_node(situation: Situation, draft: Draft, pods: list[PodView]) -> str:
    """The scheduler's message about the first pod, and what to change."""
    pod = pods[0]
    more = f" (and {len(pods) - 1} more)" if len(pods) > 1 else ""
    said = scheduler_says(pod)
    node = "node" if lacks_more_than_nodes(pod) else f"{pod.capacity_type.value} node"
    return f"pod {pod.name}{more} has no {node}: {said}. {_what_to_do(situation, draft, pod)}"


def _what_to_do(situation: Situation, draft: Draft, pod: PodView) -> str:
    lacks_nodes = not lacks_more_than_nodes(pod)
    if draft.running is not None and lacks_nodes:
        nodes = counted(len(draft.running.members), "node")
        if pod.uid in places(situation, draft.status).prewarmed:
            return f"Training continues on {nodes}, and the pod would only replace one of them"
        return f"Training continues on {nodes}, and the pod joins it once a node is free"
    spot = spot_sentence(situation, draft) if lacks_nodes and pod.capacity_type is CapacityType.SPOT else ""
    return ". ".join(part for part in (advice(situation, pod), spot) if part)
