"""What holds of every plan, whatever happened before it."""

from __future__ import annotations

from collections.abc import Iterator, Set
from datetime import datetime

from spottrain_api.contract.assignments import CapacityType
from spottrain_api.contract.notices import Notice, NoticeKind
from spottrain_api.contract.reports import CommitRef
from spottrain_api.v1alpha1.spending import TimeStatus
from spottrain_api.v1alpha1.status import GenerationState, GenerationStatus, TrainingJobStatus
from spottrain_operator.core.model import DeletePod, Observed, Plan
from spottrain_operator.core.plan import plan
from spottrain_operator.core.timing import seconds_between


def problems_of(observed: Observed, decided: Plan, going: Set[str]) -> Iterator[str]:
    """What is wrong with a plan.

    Nothing may go back, and a generation must start with members that can run it.

    `going` names the nodes that will be taken: a node object may still show the notice of a machine of its name
    that is gone.
    """
    before, new = observed.job.status.generation, decided.status.generation
    if _went_back(observed.job.status.commit, decided.status.commit):
        yield "the commit went back"
    yield from _problems_of_time(observed.job.status, decided.status)
    if new is None:
        return
    if before is not None and new.number < before.number:
        yield "the generation's number went back"
    if new.state is GenerationState.ACTIVE and (before is None or new.number > before.number):
        yield from _problems_of_start(observed, decided, new, going)


def checked_plan(observed: Observed, now: datetime) -> Plan:
    """The plan, in a world whose nodes go if they show that they will."""
    decided = plan(observed, now)
    problems = list(problems_of(observed, decided, observed.nodes.keys()))
    assert not problems, f"{problems} {decided}"
    return decided


def parts_of(time: TimeStatus | None) -> dict[str, float]:
    """The parts of a job's time, by name."""
    return {} if time is None else {name: value for name, value in time if name != "until"}


def _problems_of_time(before: TrainingJobStatus, after: TrainingJobStatus) -> Iterator[str]:
    old, new = parts_of(before.time), parts_of(after.time)
    if any(new.get(name, 0.0) < seconds for name, seconds in old.items()):
        yield f"a part of the time went down: {old} {new}"
    if after.time is None or after.start_time is None:
        return
    if abs(sum(new.values()) - seconds_between(after.start_time, after.time.until)) > 1e-3:
        yield f"the parts don't add up: {after.start_time} {after.time}"
    if after.completion_time is not None and after.time.until != after.completion_time:
        yield "some of a finished job's time is missing"


def _went_back(old: CommitRef | None, new: CommitRef | None) -> bool:
    if old is None:
        return False
    return new is None or (new.generation, new.step) < (old.generation, old.step)


def _problems_of_start(observed: Observed, decided: Plan, new: GenerationStatus, going: Set[str]) -> Iterator[str]:
    pods = {pod.uid: pod for pod in observed.pods}
    limits = observed.job.spec.nodes
    if not limits.min <= len(new.members) <= limits.max:
        yield f"{len(new.members)} members"
    if [m.node_rank for m in new.members] != list(range(len(new.members))):
        yield "node ranks have holes"
    types = [m.capacity_type for m in new.members]
    if CapacityType.ON_DEMAND in types and types[0] is not CapacityType.ON_DEMAND:
        yield "rank 0 isn't on-demand"
    deleted = {action.uid for action in decided.actions if isinstance(action, DeletePod)}
    for member in new.members:
        pod = pods.get(member.pod_uid)
        node = observed.nodes.get(pod.node or "") if pod is not None else None
        if pod is None or not pod.ready or pod.deleting or pod.uid in deleted:
            yield f"{member.pod} isn't ready"
        shown = node.notice if node is not None else None
        if node is None or (_announces_loss(shown) and node.name in going):
            yield f"{member.pod} is doomed"


def _announces_loss(shown: Notice | None) -> bool:
    return shown is not None and not shown.cancelled and shown.kind is not NoticeKind.REBALANCE
