"""What the status of a pod doesn't say of why it doesn't start.

That is what its events say, and since when it can't. For its events, the API server goes through all of a namespace,
so it is asked seldom. An urgent pass doesn't ask, and no pass fails without an answer.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from datetime import datetime

from spottrain_api.contract.conditions import WaitingReason
from spottrain_operator.core.model import CANNOT_START, PodView
from spottrain_operator.core.timing import DEFAULT_TIMING, Timing, after, seconds_between
from spottrain_operator.core.words.scheduling import INCOMPLETE, UNSEEN
from spottrain_operator.kube.cluster import Cluster
from spottrain_operator.kube.errors import ClusterError
from spottrain_operator.kube.identities import JobKey
from spottrain_operator.kube.limits import is_urgent
from spottrain_operator.kube.resources import Manifest
from spottrain_operator.objects.events import events_about
from spottrain_operator.objects.observe import quoted

logger = logging.getLogger(__name__)

READ_AGAIN_SECONDS = 10.0


@dataclass(frozen=True, slots=True)
class _Answer:
    pod_uid: str
    at: datetime | None = None  # when they were read; None: never
    events: Sequence[Manifest] = ()


@dataclass(slots=True, kw_only=True)
class KnownTroubles:
    """What is known of why pods of one job don't start.

    Attributes:
        answer: The events of one pod. None if no pod waits for what they say.
        waiting_since: When each pod was first seen to wait for a reason, by the pod's uid and the reason.
    """

    answer: _Answer | None = None
    waiting_since: dict[tuple[str, str | None], datetime] = field(default_factory=dict)


class PodEvents:
    """Reads the events of one pod of a job, and keeps them for a while.

    What keeps it from starting usually blocks its siblings, too. Of each pod, it keeps since when it can't start.
    """

    def __init__(self, cluster: Cluster, timing: Timing = DEFAULT_TIMING) -> None:
        self._timing = timing
        self._cluster = cluster

    async def explained(
        self, key: JobKey, known: KnownTroubles, pods: Sequence[PodView], now: datetime
    ) -> tuple[PodView, ...]:
        """The pods of the job, with since when each can't start.

        The first one that doesn't start has what its events say.
        """
        first = next((pod for pod in pods if wants_events(pod, now, self._timing)), None)
        if first is None:
            known.answer = None
        else:
            events = await self._events_of(first, key, known, now)
            pods = [with_events(pod, events, now, self._timing) if pod is first else pod for pod in pods]
        return _dated(known, pods, now)

    async def _events_of(self, pod: PodView, key: JobKey, known: KnownTroubles, now: datetime) -> Sequence[Manifest]:
        answer = known.answer
        if answer is None or answer.pod_uid != pod.uid:
            answer = _Answer(pod.uid)
        is_new = answer.at is not None and seconds_between(answer.at, now) < READ_AGAIN_SECONDS
        if is_new or is_urgent.get():
            return answer.events
        try:
            events: Sequence[Manifest] = await events_about(self._cluster, key.namespace, uid=pod.uid)
        except ClusterError as error:
            logger.warning("%s: the events of its pod %s can't be read: %s", key, pod.name, error)
            events = answer.events
        known.answer = _Answer(pod.uid, now, events)
        return events


def _dated(known: KnownTroubles, pods: Sequence[PodView], now: datetime) -> tuple[PodView, ...]:
    """The pods, with when each was first seen to wait for its reason.

    A reason that comes and goes, as of a container that is restarted, counts from the first time.
    """
    uids = {pod.uid for pod in pods}
    since = {which: at for which, at in known.waiting_since.items() if which[0] in uids}
    for pod in pods:
        if pod.waiting_reason in CANNOT_START:
            since.setdefault((pod.uid, pod.waiting_reason), now)
    known.waiting_since = since
    if not since:
        return tuple(pods)
    return tuple(replace(pod, waiting_since=since.get((pod.uid, pod.waiting_reason))) for pod in pods)


def wants_events(pod: PodView, now: datetime, timing: Timing = DEFAULT_TIMING) -> bool:
    """Whether only events may say why the pod doesn't start."""
    return _may_wait_for_volumes(pod, now, timing) or _backs_off(pod) or _is_unseen(pod, now, timing)


def _is_unseen(pod: PodView, now: datetime, timing: Timing) -> bool:
    """Whether no scheduler has placed the pod, nor said why not."""
    waits = pod.node is None and pod.unschedulable_since is None and pod.phase == "Pending" and not pod.deleting
    return waits and seconds_between(pod.created_at, now) > timing.unseen_by_scheduler


def _may_wait_for_volumes(pod: PodView, now: datetime, timing: Timing) -> bool:
    """Whether its containers should exist by now, and don't."""
    waiting = pod.waiting_reason in ("ContainerCreating", "PodInitializing", None)
    started = pod.container_started or pod.initializing_since is not None
    if pod.node is None or not waiting or started or pod.phase != "Pending":
        return False
    return pod.scheduled_at is None or seconds_between(pod.scheduled_at, now) > timing.starts_containers


def _backs_off(pod: PodView) -> bool:
    """Whether it waits for an image, and doesn't say why the last pull failed.

    Kubelets say so from Kubernetes 1.32 on.
    """
    return pod.waiting_reason == WaitingReason.IMAGE_PULL_BACK_OFF and (
        WaitingReason.ERR_IMAGE_PULL not in (pod.waiting_message or "")
    )


def with_events(pod: PodView, events: Sequence[Manifest], now: datetime, timing: Timing = DEFAULT_TIMING) -> PodView:
    """Add what events say of why the pod doesn't start.

    The newest is the last.
    """
    if _is_unseen(pod, now, timing):
        warned = next((event.get("message") for event in reversed(events) if event.get("type") == "Warning"), None)
        return replace(
            pod,
            waiting_reason="Unschedulable",
            waiting_message=": ".join(part for part in (INCOMPLETE if pod.group else UNSEEN, quoted(warned)) if part),
            unschedulable_since=after(pod.created_at, timing.unseen_by_scheduler),
        )
    if _backs_off(pod):
        said = (event.get("message", "") for event in reversed(events) if event.get("reason") == "Failed")
        cause = next((message for message in said if message.startswith("Failed to pull image")), None)
        return replace(pod, waiting_message=quoted(cause)) if cause else pod
    if not events or events[-1].get("reason") != "FailedMount":
        return pod
    return replace(pod, waiting_reason="FailedMount", waiting_message=quoted(events[-1].get("message")))
