"""Which pods will be gone soon, by any signal that announces it.

Signals come twice, late, from two sources, or are taken back. The newest version of each notice counts.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from datetime import datetime

from spottrain_api.contract.assignments import AgentReport
from spottrain_api.contract.causes import Cause
from spottrain_api.contract.names import TAINT_PREEMPTION
from spottrain_api.contract.nodes import (
    NODE_DELETION_LEAD_SECONDS,
    TAINTS,
    announcing_labels,
    eviction_grace_seconds,
)
from spottrain_api.contract.notices import DRAINING_KINDS, Notice, NoticeKind
from spottrain_api.v1alpha1.status import GenerationStatus
from spottrain_operator.core.model import NodeView, Observed, PodView
from spottrain_operator.core.timing import Timing, after, seconds_between
from spottrain_runtime.wording import one_line

# Reason of the DisruptionTarget condition of a pod that the scheduler removes for another one:
# https://kubernetes.io/docs/concepts/workloads/pods/disruptions/#pod-disruption-conditions
_BY_SCHEDULER = "PreemptionByScheduler"
_MAKES_WAY = "makes way for one of higher priority"
# Taints that announce the loss of a node: the watcher's and those of others, without mere recommendations.
_LOSS_TAINTS = frozenset(
    {TAINT_PREEMPTION, *(key for key, meaning in TAINTS.items() if meaning.kind in DRAINING_KINDS)}
)


def loss_marks(taints: Iterable[str], labels: Mapping[str, str]) -> frozenset[str]:
    """Keys of the taints and labels of a node that announce its loss."""
    announcing = {key for key, meaning in announcing_labels(labels).items() if meaning.kind in DRAINING_KINDS}
    return _LOSS_TAINTS.intersection(taints) | announcing


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeLoss:
    """A pod will be gone soon.

    Attributes:
        message: What announced it, as a sentence.
        deadline: When the pod will be gone.
        before_pod: Whether it was announced for the node before the pod came.
    """

    message: str
    deadline: datetime
    before_pod: bool = False


def coming_loss_of(
    pod: PodView, node: NodeView | None, report: AgentReport | None, now: datetime, timing: Timing, *, joined: bool
) -> NodeLoss | None:
    """Why and when `pod` will be gone, if that was announced.

    Of several notices, the earliest deadline counts. A node doesn't say since when it has a taint: one with a pod
    that has `joined` the newest generation had none before, and any other may have had it.
    """
    newest = _newest(node, report)
    standing = _standing(newest, report, pod, now, timing)
    losses = [
        NodeLoss(message=_sentence(notice), deadline=notice.deadline, before_pod=notice.observed_at < pod.created_at)
        for notice in standing
    ]
    if pod.deleting:
        killed_at = pod.deletion_deadline or after(now, timing.unknown_lead)
        losses.append(NodeLoss(message=f"pod {pod.name} is being deleted", deadline=killed_at))
    elif pod.disruption is not None:
        why = _MAKES_WAY if pod.disruption == _BY_SCHEDULER else "is being evicted"
        grace = eviction_grace_seconds(pod.grace_seconds, pod.disruption, node.labels if node is not None else {})
        killed_at = after(pod.disrupted_at or now, grace)
        losses.append(NodeLoss(message=f"pod {pod.name} {why} ({pod.disruption})", deadline=killed_at))
    if not standing and node is not None:
        losses += [
            NodeLoss(message=message, deadline=after(now, lead), before_pod=not joined)
            for message, lead in _signals(node, newest, timing)
        ]
    return min(losses, key=lambda loss: loss.deadline, default=None)


def is_hinted(node: NodeView | None) -> bool:
    """Whether the cloud recommends to leave the node.

    That announces no loss: the node may stay for hours. The annotation counts as long as it stands, because a
    recommendation has no deadline.
    """
    notice = node.notice if node is not None else None
    return notice is not None and notice.kind is NoticeKind.REBALANCE and not notice.cancelled


def notice_of_end(generation: GenerationStatus, observed: Observed) -> Notice | None:
    """The oldest notice for which a member of `generation` drains.

    Its node may show it before its agent says it. None if the generation doesn't end for a notice.
    """
    requested_at = generation.requested_at
    if generation.reason != Cause.PREEMPTED or requested_at is None:
        return None
    members = {member.pod_uid for member in generation.members}
    notices = (
        notice for pod in observed.pods if pod.uid in members for notice in _notices_of(pod, observed, requested_at)
    )
    return min(notices, key=lambda notice: notice.observed_at, default=None)


def _notices_of(pod: PodView, observed: Observed, now: datetime) -> list[Notice]:
    """The notices for which `pod` drains."""
    view = observed.reports.get(pod.uid)
    report = view.report if view is not None else None
    return _standing(_newest(observed.nodes.get(pod.node or ""), report), report, pod, now, observed.timing)


def _signals(node: NodeView, newest: Mapping[str, Notice], timing: Timing) -> list[tuple[str, float]]:
    """What a node without a notice in force shows of its loss.

    These are sentences, each with the seconds that remain.

    The watcher's taint means nothing once its notice is taken back. The agent may know that before the node shows it.
    """
    cancelled = node.notice is not None and newest[node.notice.id].cancelled
    signals = [(f"node {node.name} is being deleted", NODE_DELETION_LEAD_SECONDS)] if node.deleting else []
    for taint in node.taints:
        if taint in _LOSS_TAINTS and not (cancelled and taint == TAINT_PREEMPTION):
            lead = timing.unknown_lead if taint == TAINT_PREEMPTION else TAINTS[taint].lead_on(node.labels)
            signals.append((f"node {node.name} is tainted {taint}", lead))
    for label, meaning in announcing_labels(node.labels).items():
        if meaning.kind in DRAINING_KINDS:
            signals.append((f"node {node.name} has the label {label}", meaning.lead_on(node.labels)))
    return signals


def _newest(node: NodeView | None, report: AgentReport | None) -> dict[str, Notice]:
    """The newest version of each notice, by id.

    Of two that are as new, a cancellation counts.
    """
    annotated = [node.notice] if node is not None and node.notice is not None else []
    newest: dict[str, Notice] = {}
    for notice in (*annotated, *(report.notices if report is not None else ())):
        known = newest.get(notice.id)
        if known is None or (notice.observed_at, notice.cancelled) > (known.observed_at, known.cancelled):
            newest[notice.id] = notice
    return newest


def _standing(
    newest: Mapping[str, Notice], report: AgentReport | None, pod: PodView, now: datetime, timing: Timing
) -> list[Notice]:
    """The notices for which `pod` drains: in force, and no mere hints."""
    # The agent drains for any notice that it has, whatever its assignment. An annotation may be a leftover.
    held_true = {notice.id for notice in report.notices} if report is not None else set()
    return [
        notice
        for notice in newest.values()
        if notice.makes_drain
        and pod.node in (None, notice.node)
        and (notice.id in held_true or _is_fresh(notice, pod, now, timing))
    ]


def _is_fresh(notice: Notice, pod: PodView, now: datetime, timing: Timing) -> bool:
    """Whether the notice is about this node, and not an old false alarm.

    An old notice may be about an earlier node of the same name.
    """
    return notice.deadline > pod.created_at and seconds_between(notice.deadline, now) < timing.notice_expiry


def _sentence(notice: Notice) -> str:
    source = one_line(notice.source, most=80)
    subject = f"node {notice.node}"
    if notice.kind is NoticeKind.EVICT:
        subject = f"the pod on {subject}"
        if notice.source.endswith(_BY_SCHEDULER):
            subject += f" {_MAKES_WAY}, and"
    return f"{subject} goes at {notice.deadline:%H:%M:%S} UTC ({notice.kind.value} notice from {source})"
