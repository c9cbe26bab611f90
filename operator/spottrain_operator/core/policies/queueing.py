"""Asks Kueue for the quota of a job's nodes, and gives back what Kueue takes or the job needs no more.

A Workload asks for `nodes.min`, and one more for each node beyond: Kueue takes these back one by one, and the job
shrinks. Quota is given back once the nodes are: it never counts less than the job has.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from enum import StrEnum

from spottrain_api.contract.assignments import CapacityType
from spottrain_api.contract.causes import Cause
from spottrain_api.contract.conditions import ConditionReason, ConditionType
from spottrain_api.v1alpha1.status import Phase
from spottrain_operator.core.draft import Draft
from spottrain_operator.core.facts.demand import demand, minimum_nodes
from spottrain_operator.core.facts.pauses import own_pause
from spottrain_operator.core.facts.queue import (
    content_that_counts,
    evicted,
    granting,
    minimum_of,
    queue_of,
    taken_sentence,
    total,
    waiting_sentence,
)
from spottrain_operator.core.facts.situation import Situation
from spottrain_operator.core.policies.gangs import holds_off
from spottrain_operator.core.policies.profiles import waits_for_profile
from spottrain_operator.core.policies.understanding import waits_to_be_understood
from spottrain_operator.core.workloads import (
    CreateWorkload,
    DeleteWorkload,
    FinishWorkload,
    Nodes,
    Part,
    QueueView,
    ReadyWorkload,
    ReleaseWorkload,
    WorkloadView,
)
from spottrain_runtime.wording import counted


def ask_for_quota(situation: Situation, draft: Draft) -> Draft:
    """Admitted: whether Kueue lets the job have the nodes of nodes.min."""
    queue = situation.observed.queue
    if queue is not None:
        kept = _kept(situation, draft, queue)
        draft = _give_back(situation, draft, queue, kept)
        draft = _report_ready(situation, draft, queue)
        if _asks(situation, draft, queue):
            draft = _ask(situation, draft, queue, kept)
    return _describe(situation, draft)


def finish(situation: Situation, draft: Draft) -> Draft:
    """Give all quota back once the job's pods have ended. The Workload of nodes.min stays as its record."""
    queue = situation.observed.queue
    if queue is None or total_of_pods(situation).total():
        return draft
    for each in queue.workloads:
        if each.part is Part.MORE or each.content != queue.content:
            draft = draft.act(DeleteWorkload(name=each.name, uid=each.uid))
        elif not each.finished:
            succeeded = draft.status.phase is Phase.SUCCEEDED
            message = draft.status.message or ""
            draft = draft.act(FinishWorkload(name=each.name, uid=each.uid, succeeded=succeeded, message=message))
    if draft.status.condition(ConditionType.ADMITTED) is None:
        return draft
    message = "The job has finished, and holds no quota"
    return draft.condition(ConditionType.ADMITTED, False, ConditionReason.FINISHED, message, situation.now)


def total_of_pods(situation: Situation) -> Counter[CapacityType]:
    """How many pods may use nodes, by type. One that terminates does."""
    return Counter(facts.pod.capacity_type for facts in situation.pods.values() if not facts.ended)


def _asks(situation: Situation, draft: Draft, queue: QueueView) -> bool:
    """Whether the job wants nodes, now or once it has quota."""
    idle = draft.running is None
    waits = (idle and situation.observed.rival is not None) or waits_to_be_understood(situation, draft)
    waits = waits or (idle and waits_for_profile(situation))
    return bool(queue.name) and own_pause(situation) is None and not (waits or holds_off(situation, draft))


def _kept(situation: Situation, draft: Draft, queue: QueueView) -> list[WorkloadView]:
    """The Workloads that the job still needs, also if it has to give their quota back for now."""
    if situation.observed.job.left_out:
        return list(queue.workloads)
    if not _asks(situation, draft, queue):
        return []
    content = content_that_counts(situation, queue)
    kept = [w for w in queue.workloads if w.part is Part.MINIMUM and w.content in (content, queue.content)]
    if not granting(situation, queue):
        return kept
    for capacity_type, number in _wanted_more(situation, draft).items():
        kept += _more_of(queue, content, capacity_type)[:number]
    return kept


def _more_of(queue: QueueView, content: str, capacity_type: CapacityType) -> list[WorkloadView]:
    """Those for one more node of a type. Those that are granted come first."""
    found = [w for w in queue.workloads if w.part is Part.MORE and w.content == content and w.nodes[capacity_type]]
    return sorted(found, key=lambda w: (not w.grants, w.name))


def _wanted_more(situation: Situation, draft: Draft) -> Nodes:
    """How many nodes of each type the job wants beyond nodes.min."""
    wanted, least = demand(situation.spec), minimum_nodes(situation.spec)
    spot, on_demand = wanted.spot, wanted.on_demand
    if draft.status.fallback_since is not None:
        placed = (f.pod for f in situation.pods.values() if f.pod.node is not None and not f.finished)
        spot = min(spot, sum(pod.capacity_type is CapacityType.SPOT for pod in placed))
        on_demand = min(wanted.max_on_demand, wanted.total - spot)
    more = {CapacityType.ON_DEMAND: on_demand, CapacityType.SPOT: spot}
    return {each: max(0, number - least[each]) for each, number in more.items()}


def _give_back(situation: Situation, draft: Draft, queue: QueueView, kept: list[WorkloadView]) -> Draft:
    """Release what is evicted, and delete what isn't needed, as far as the job has no pods for it."""
    pods, held = total_of_pods(situation), total(w for w in queue.workloads if w.reserved)
    for each in sorted(queue.workloads, key=lambda w: (w.part is Part.MINIMUM, w.name)):
        if each in kept and not (each.evicted and each.reserved):
            continue
        if each.reserved:
            left = held - Counter(each.nodes)
            if not _fit(pods, left):
                continue
            held = left
        act = ReleaseWorkload if each in kept else DeleteWorkload
        draft = draft.act(act(name=each.name, uid=each.uid))
    return draft


def _fit(pods: Nodes, quota: Nodes) -> bool:
    return all(pods.get(each, 0) <= quota.get(each, 0) for each in CapacityType)


def _report_ready(situation: Situation, draft: Draft, queue: QueueView) -> Draft:
    """Say that pods are ready: those of nodes.min once they train, and all once all are up."""
    workloads = granting(situation, queue)
    up = Counter(f.pod.capacity_type for f in situation.pods.values() if f.pod.ready and f.usable)
    all_up = _fit(total(workloads), up)
    for each in workloads:
        if not each.ready and (all_up or (each.part is Part.MINIMUM and draft.running is not None)):
            draft = draft.act(ReadyWorkload(name=each.name, uid=each.uid))
    return draft


def _ask(situation: Situation, draft: Draft, queue: QueueView, kept: list[WorkloadView]) -> Draft:
    """Make the Workload of nodes.min, and once it is granted, one after the other for more nodes.

    So the job has one Workload of each type at most that Kueue has not admitted before.
    """
    if situation.observed.job.left_out:
        return draft
    if minimum_of(queue, queue.content) is None:
        name = f"{situation.observed.job.name}-{queue.content}"
        nodes = minimum_nodes(situation.spec)
        return draft.act(CreateWorkload(name=name, part=Part.MINIMUM, content=queue.content, nodes=nodes))
    if content_that_counts(situation, queue) != queue.content or not granting(situation, queue):
        return draft
    for capacity_type, number in _wanted_more(situation, draft).items():
        there = [w for w in kept if w.part is Part.MORE and w.nodes[capacity_type]]
        if len(there) < number and all(w.grants for w in there):
            name = _free_name(situation, queue, capacity_type)
            nodes = {each: int(each is capacity_type) for each in CapacityType}
            draft = draft.act(CreateWorkload(name=name, part=Part.MORE, content=queue.content, nodes=nodes))
    return draft


def _free_name(situation: Situation, queue: QueueView, capacity_type: CapacityType) -> str:
    taken = {w.name for w in queue.workloads}
    stem = f"{situation.observed.job.name}-{queue.content}-{capacity_type.value}"
    return next(name for number in range(1, len(taken) + 2) if (name := f"{stem}-{number}") not in taken)


def _describe(situation: Situation, draft: Draft) -> Draft:
    queue, known = queue_of(situation), draft.status.condition(ConditionType.ADMITTED)
    if queue is None and known is None:
        return draft
    holds, reason, message = _said(situation, draft, queue)
    return draft.condition(ConditionType.ADMITTED, holds, reason, message, situation.now)


def _said(situation: Situation, draft: Draft, queue: QueueView | None) -> tuple[bool, StrEnum, str]:
    if queue is None:
        return True, ConditionReason.NO_QUEUE, "The job is in no queue"
    if not _asks(situation, draft, queue):
        message = f"The job asks for no nodes, and gives back what it holds in queue {queue.name}"
        return False, ConditionReason.ASKS_FOR_NO_NODES, message
    content = content_that_counts(situation, queue)
    minimum = minimum_of(queue, content)
    if minimum is not None and minimum.grants:
        return True, ConditionReason.ADMITTED, _admitted_sentence(situation, queue)
    why = waiting_sentence(queue, minimum)
    message = why[0].upper() + why[1:]
    if queue.trouble is not None:
        return False, queue.trouble.reason, message
    taken = minimum is not None and minimum.evicted and minimum.reserved
    return False, Cause.QUOTA_TAKEN if taken else ConditionReason.WAITS_FOR_QUOTA, message


def _admitted_sentence(situation: Situation, queue: QueueView) -> str:
    number = total(granting(situation, queue)).total()
    text = f"Kueue grants the job {counted(number, 'node')} in queue {queue.name}"
    if (workload := evicted(situation)) is not None:
        return f"{text}. {taken_sentence(workload)}"
    waiting = _first_that_waits(queue.workloads)
    return f"{text}. For one more, it waits: {waiting.message}" if waiting is not None else text


def _first_that_waits(workloads: Iterable[WorkloadView]) -> WorkloadView | None:
    return next((w for w in workloads if w.part is Part.MORE and not w.grants and w.message), None)
