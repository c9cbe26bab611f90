"""Which nodes Kueue lets a job have."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

from spottrain_api.contract.assignments import CapacityType
from spottrain_operator.core.facts.situation import Situation
from spottrain_operator.core.workloads import Nodes, Part, QueueView, WorkloadView

# Kueue has not looked at the Workload yet.
_NOT_LOOKED_AT = frozenset({"", "PendingEvaluation"})


def queue_of(situation: Situation) -> QueueView | None:
    """The queue that the job is in; None if it is in none."""
    queue = situation.observed.queue
    return queue if queue is not None and queue.name else None


def total(workloads: Iterable[WorkloadView]) -> Counter[CapacityType]:
    """How many nodes these ask for."""
    found: Counter[CapacityType] = Counter()
    for each in workloads:
        found.update(each.nodes)
    return found


def minimum_of(queue: QueueView, content: str) -> WorkloadView | None:
    """The Workload of this content without which the job can't train."""
    return next((w for w in queue.workloads if w.part is Part.MINIMUM and w.content == content), None)


def content_that_counts(situation: Situation, queue: QueueView) -> str:
    """The content of the Workloads that count.

    After an edit, those from before it count until Kueue has admitted or refused what takes their place.
    """
    new = minimum_of(queue, queue.content)
    if new is not None and (new.grants or new.reason not in _NOT_LOOKED_AT):
        return queue.content
    old = (w.content for w in queue.workloads if w.part is Part.MINIMUM and w.grants)
    return next(old, queue.content)


def granting(situation: Situation, queue: QueueView) -> list[WorkloadView]:
    """The Workloads whose nodes the job may have: none without the one for nodes.min."""
    content = content_that_counts(situation, queue)
    minimum = minimum_of(queue, content)
    if minimum is None or not minimum.grants:
        return []
    return [w for w in queue.workloads if w.content == content and w.grants]


def granted(situation: Situation) -> Nodes | None:
    """The nodes that Kueue lets the job have; None if it is in no queue."""
    queue = queue_of(situation)
    return None if queue is None else situation.once("granted", lambda: total(granting(situation, queue)))


def evicted(situation: Situation) -> WorkloadView | None:
    """A Workload that Kueue takes back. That of nodes.min comes first."""
    queue = queue_of(situation)
    found = [w for w in queue.workloads if w.evicted and w.reserved] if queue is not None else []
    return min(found, key=lambda w: (w.part is not Part.MINIMUM, w.name), default=None)


def taken_sentence(workload: WorkloadView) -> str:
    """Why Kueue takes quota back, as a clause."""
    number = sum(workload.nodes.values())
    what = f"the job's quota of {number} nodes" if workload.part is Part.MINIMUM else "the quota of a node"
    return f"Kueue takes {what} back ({workload.reason}): {workload.message}"


def waiting_sentence(queue: QueueView, workload: WorkloadView | None) -> str:
    """What a job without quota waits for, as a clause."""
    if queue.trouble is not None:
        return queue.trouble.message
    if workload is None:
        return f"it waits for its place in queue {queue.name}"
    if not workload.active:
        return (
            f"its Workload {workload.name} was deactivated. To let it wait in queue {queue.name} again, set the "
            "Workload's spec.active to true"
        )
    if workload.evicted and workload.reserved:
        return taken_sentence(workload)
    if workload.reason in _NOT_LOOKED_AT:
        return (
            f"it waits in queue {queue.name}. Kueue has not said yet for what: if it never does, see whether it runs"
        )
    return f"it waits for quota in queue {queue.name}: {workload.message}"
