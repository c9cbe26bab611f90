"""What events say of why a pod doesn't start."""

from __future__ import annotations

from dataclasses import replace
from datetime import timedelta
from typing import Any

from scene import START, pod
from spottrain_operator.core.model import PodView
from spottrain_operator.kube.errors import ClusterError
from spottrain_operator.kube.identities import JobKey
from spottrain_operator.kube.limits import is_urgent
from spottrain_operator.kube.resources import EVENTS
from spottrain_operator.objects.pod_events import (
    READ_AGAIN_SECONDS,
    KnownTroubles,
    PodEvents,
    wants_events,
    with_events,
)
from world.cluster import MemoryCluster
from world.faults import Fault

KEY = JobKey(namespace="team", name="job")
NOT_UP: dict[str, Any] = {"phase": "Pending", "ready": False, "ready_since": None, "container_started": False}
LATER = START + timedelta(seconds=31)
UNMOUNTED = {"reason": "FailedMount", "message": 'secret "keys" not found', "involvedObject": {"uid": "u1"}}


def creating(sequence: int = 1, **changes: Any) -> PodView:
    return pod(sequence, **NOT_UP | {"waiting_reason": "ContainerCreating"} | changes)


def test_a_pod_without_its_volumes_waits_for_what_the_newest_event_says() -> None:
    waiting = creating()
    assert wants_events(waiting, LATER)
    assert not wants_events(waiting, START), "it was placed just now"
    assert not wants_events(creating(node=None, scheduled_at=None), START), "it has no node yet"
    assert not wants_events(creating(waiting_reason="PodInitializing", initializing_since=START), LATER), "it runs"
    assert with_events(waiting, [], LATER) == waiting
    assert with_events(waiting, [UNMOUNTED, {"reason": "Pulling"}], LATER) == waiting
    told = with_events(waiting, [{"reason": "Scheduled"}, UNMOUNTED], LATER)
    assert (told.waiting_reason, told.waiting_message) == ("FailedMount", 'secret "keys" not found')


def test_a_pod_that_no_scheduler_looks_at_says_so_with_its_newest_warning() -> None:
    new = pod(1, **NOT_UP, node=None, scheduled_at=None)
    assert with_events(new, [], START) == new
    assert wants_events(new, LATER)
    told = with_events(new, [], LATER)
    assert told.waiting_message == "no scheduler has looked at it"
    assert told.unschedulable_since == START + timedelta(seconds=30)
    missing = 'PodResourceClaim eight: resourceclaimtemplates "eight" not found'
    events = [{"type": "Warning", "message": missing}, {"type": "Normal", "message": "Created"}]
    assert with_events(new, events, LATER).waiting_message == f"no scheduler has looked at it: {missing}"
    grouped = with_events(replace(new, group="g"), [], LATER)
    assert grouped.waiting_message == "the scheduler waits until as many of the job's pods exist as nodes.min"
    assert with_events(pod(1, **NOT_UP), [], LATER).unschedulable_since is None, "it has a node"


def test_an_image_that_cannot_be_pulled_keeps_the_answer_of_its_registry() -> None:
    def waits(message: str) -> PodView:
        return creating(waiting_reason="ImagePullBackOff", waiting_message=message)

    silent, telling = waits('Back-off pulling image "a:1"'), waits('Back-off … "a:1": ErrImagePull: not found')
    assert not wants_events(telling, LATER)
    assert wants_events(silent, LATER)
    answer = 'Failed to pull image "a:1": unauthorized'
    events = [
        {"reason": "Failed", "message": 'Failed to pull image "a:1": timed out'},
        {"reason": "Failed", "message": answer + "!" * 2000},
        {"reason": "Failed", "message": "Error: ErrImagePull"},
        {"reason": "BackOff", "message": 'Back-off pulling image "a:1"'},
    ]
    told = with_events(silent, events, LATER)
    assert told.waiting_reason == "ImagePullBackOff"
    assert (told.waiting_message or "").startswith(answer + "!")
    assert len(told.waiting_message or "") <= 1000
    assert with_events(silent, events[2:], LATER) == silent, "the event has expired"


async def test_events_are_read_of_one_pod_and_seldom() -> None:
    """The API server goes through all events of the namespace for each such question."""
    cluster = MemoryCluster()
    events = PodEvents(cluster)
    known = KnownTroubles()

    async def reason(now: float, *pods: PodView) -> str | None:
        first, *_ = await events.explained(KEY, known, pods, LATER + timedelta(seconds=now))
        return first.waiting_reason

    assert await reason(0.0, creating(1), creating(2)) == "ContainerCreating"
    cluster.put_event(KEY.namespace, UNMOUNTED)
    assert await reason(READ_AGAIN_SECONDS - 0.1, creating(1), creating(2)) == "ContainerCreating"
    assert cluster.num_reads[EVENTS] == 1
    assert await reason(READ_AGAIN_SECONDS, creating(1), creating(2)) == "FailedMount"
    assert await reason(READ_AGAIN_SECONDS + 0.1, creating(1)) == "FailedMount", "as read before"
    assert cluster.num_reads[EVENTS] == 2
    assert await reason(READ_AGAIN_SECONDS + 0.2, creating(2)) == "ContainerCreating", "another pod is read at once"
    assert cluster.num_reads[EVENTS] == 3
    assert await reason(READ_AGAIN_SECONDS + 0.3, pod(1)) is None
    assert cluster.num_reads[EVENTS] == 3, "all are up"


async def test_the_time_of_each_reason_is_when_it_was_first_seen() -> None:
    events = PodEvents(MemoryCluster())
    known = KnownTroubles()

    async def since(now: float, *pods: PodView) -> list[float | None]:
        views = await events.explained(KEY, known, pods, START + timedelta(seconds=now))
        return [(pod.waiting_since - START).total_seconds() if pod.waiting_since else None for pod in views]

    pull, backs_off = creating(1, waiting_reason="ErrImagePull"), creating(1, waiting_reason="ImagePullBackOff")
    assert await since(0, creating(1), creating(2)) == [None, None]
    assert await since(1, pull, creating(2)) == [1, None]
    assert await since(2, backs_off, creating(2, waiting_reason="StartError")) == [2, 2]
    assert await since(3, creating(1), creating(2)) == [None, None]
    assert await since(4, pull, backs_off) == [1, 2], "a reason that comes back"
    assert await since(5, creating(2)) == [None]
    assert await since(6, pull) == [6], "the pod was gone"
    known = KnownTroubles()
    assert await since(7, pull) == [7], "the job is forgotten"


async def test_events_that_can_not_be_read_leave_what_is_known_and_are_asked_for_as_seldom() -> None:
    cluster = MemoryCluster()
    silent = Fault(error=ClusterError("too many requests", retry_after=1.0), resource=EVENTS)
    cluster.after.append(silent)
    cluster.put_event(KEY.namespace, UNMOUNTED)
    events = PodEvents(cluster)
    known = KnownTroubles()

    async def reason(now: float) -> str | None:
        [first] = await events.explained(KEY, known, [creating()], LATER + timedelta(seconds=now))
        return first.waiting_reason

    assert await reason(0.0) == await reason(READ_AGAIN_SECONDS - 0.1) == "ContainerCreating"
    assert cluster.num_reads[EVENTS] == 1
    silent.error = None
    assert await reason(READ_AGAIN_SECONDS) == "FailedMount"
    silent.error = ClusterError("too many requests", retry_after=1.0)
    assert await reason(2 * READ_AGAIN_SECONDS) == await reason(2 * READ_AGAIN_SECONDS + 0.1) == "FailedMount"
    assert cluster.num_reads[EVENTS] == 3


async def test_an_urgent_pass_asks_for_no_events() -> None:
    cluster = MemoryCluster()
    cluster.put_event(KEY.namespace, UNMOUNTED)
    events = PodEvents(cluster)
    known = KnownTroubles()
    is_urgent.set(True)
    [first] = await events.explained(KEY, known, [creating()], LATER)
    assert (first.waiting_reason, cluster.num_reads[EVENTS]) == ("ContainerCreating", 0)
    is_urgent.set(False)
    [first] = await events.explained(KEY, known, [creating()], LATER)
    assert first.waiting_reason == "FailedMount"
    is_urgent.set(True)
    [first] = await events.explained(KEY, known, [creating()], LATER + timedelta(seconds=2 * READ_AGAIN_SECONDS))
    assert (first.waiting_reason, cluster.num_reads[EVENTS]) == ("FailedMount", 1)
