"""Parses the API server's JSON into the core's values."""

from __future__ import annotations

import logging
import re
from contextlib import suppress
from datetime import UTC, datetime
from decimal import Decimal
from typing import Any

from pydantic import ValidationError

from spottrain_api.contract.assignments import CapacityType
from spottrain_api.contract.causes import Cause
from spottrain_api.contract.names import (
    ANNOTATION_NOTICE,
    ANNOTATION_POOL,
    ANNOTATION_POOL_HASH,
    ANNOTATION_WATCHER,
    LABEL_CAPACITY_TYPE,
    LABEL_QUEUE,
    LABEL_QUEUE_PRIORITY,
    LABEL_SEQUENCE,
    LABEL_TEMPLATE_HASH,
    TRAINER_CONTAINER,
)
from spottrain_api.contract.nodes import DEFAULT_GRACE_SECONDS, accepted_taints
from spottrain_api.contract.notices import Notice
from spottrain_api.tolerant import dotted, read_known
from spottrain_api.v1alpha1.free_form import too_large
from spottrain_api.v1alpha1.profile import beyond, with_profile, within
from spottrain_api.v1alpha1.spec import TrainingJobSpec
from spottrain_api.v1alpha1.status import TrainingJobStatus
from spottrain_operator.core.model import FAILED_STARTS, PROTECTION, JobView, NodeView, PodView, Refusal
from spottrain_operator.kube.errors import NoPoolError, NotAllowedError, RefusedError
from spottrain_operator.kube.resources import Manifest
from spottrain_operator.objects.container_states import init_container, state_beside, trainer_status
from spottrain_operator.objects.containers import GPU, unwritten_requests
from spottrain_runtime.quantity import parse_quantity
from spottrain_runtime.wording import one_line

logger = logging.getLogger(__name__)


# Parts of the status that only people read, and that each pass writes again: no decision depends on them.
_FOR_PEOPLE = frozenset({"conditions", "members", "message", "progress", "strategy", "transitions"})
# The finalizer with which Kubernetes takes a job from its pods, as with `kubectl delete --cascade=orphan`.
_ORPHANS = "orphan"
# Kubernetes quotes what users wrote into a pod.
_MOST_QUOTED = 1000
_MOST_OF_REASON = 60
# A status holds the last number, with 64 bits at most.
_SEQUENCE_DIGITS = 12
_QUOTA = "exceeded quota"
# A limit that a LimitRange sets by itself, or the maximum of one.
_OF_LIMIT_RANGE = re.compile(
    r"must be less than or equal to (?P<limited>cpu|memory) limit"
    r"|maximum (?P<most>cpu|memory) usage per \w+ is \S+, but request is"
)
_UNWRITTEN = re.compile(rf"must specify (?P<names>\S+) for: {TRAINER_CONTAINER}\b")
_OF_QUOTA = re.compile(r"requested: (?P<requested>.*), used: .*, limited: (?P<limited>.*)")


class NotUnderstoodError(Exception):
    """This version doesn't understand `fields`, so it can't manage the job.

    A newer version wrote the job.
    """

    def __init__(self, fields: tuple[str, ...]) -> None:
        super().__init__(f"can't read {', '.join(fields)}")
        self.fields = fields


def job_view(job: Manifest) -> JobView:
    """Parse a job.

    What else a newer version added is left out, and the job continues without it.

    Raises:
        NotUnderstoodError: A required field of the spec can't be read, or a part of the status on which decisions
            depend.
    """
    meta = job["metadata"]
    try:
        spec, unknown = read_known(TrainingJobSpec, job.get("spec", {}))
    except ValidationError as error:
        raise NotUnderstoodError(_fields("spec", error)) from error
    large = too_large(spec)
    if "deepspeed.config" in large:  # assignments of the running generation would hold it
        spec = spec.model_copy(update={"deepspeed": spec.deepspeed.model_copy(update={"config": {}})})
    status = job_status(job)
    wrong: list[str] = []
    if (taken := status.profile) is not None:
        spec = with_profile(spec, taken.spec)
        wrong = beyond(spec, taken.name, taken.spec)
        spec = within(spec, taken.spec.limits)
    return JobView(
        namespace=meta["namespace"],
        name=meta["name"],
        uid=meta["uid"],
        spec=spec,
        metadata_generation=meta.get("generation", 0),
        created_at=_time(meta["creationTimestamp"]),
        deleting="deletionTimestamp" in meta,
        orphans_pods=orphans_pods(job),
        status=status,
        not_understood=tuple(f"spec.{dotted(path)}" for path in unknown),
        too_large=tuple(f"spec.{path}" for path in large),
        beyond_profile=tuple(wrong),
        queue=(meta.get("labels") or {}).get(LABEL_QUEUE, ""),
        queue_priority=(meta.get("labels") or {}).get(LABEL_QUEUE_PRIORITY, ""),
    )


def orphans_pods(job: Manifest) -> bool:
    """Whether the job's deletion is to leave its pods."""
    return _ORPHANS in job["metadata"].get("finalizers", ())


def job_status(job: Manifest) -> TrainingJobStatus:
    """Parse the status of a job.

    One that can't be read never counts as empty: fences and pods' names depend on it.

    Raises:
        NotUnderstoodError: A part on which decisions depend can't be read.
    """
    try:
        status, unknown = read_known(TrainingJobStatus, job.get("status") or {})
    except ValidationError as error:
        raise NotUnderstoodError(_fields("status", error)) from error
    decisive = [f"status.{dotted(path)}" for path in unknown if path[0] not in _FOR_PEOPLE]
    # How a generation ends depends on why. Once it has ended, its reason may also be that of the job's failure.
    if status.running is not None and status.running.reason not in {None, *Cause}:
        decisive.append("status.generation.reason")
    if decisive:
        raise NotUnderstoodError(tuple(decisive))
    return status


def _fields(part: str, error: ValidationError) -> tuple[str, ...]:
    return tuple(f"{part}.{dotted(each['loc'])}".removesuffix(".") for each in error.errors(include_url=False))


def pod_view(pod: Manifest) -> PodView:
    meta, status = pod["metadata"], pod.get("status", {})
    labels, annotations = meta.get("labels", {}), meta.get("annotations", {})
    conditions = {condition["type"]: condition for condition in status.get("conditions", ())}
    state = trainer_status(status).get("state", {})
    terminated = state.get("terminated", {})
    scheduled, disrupted = conditions.get("PodScheduled", {}), conditions.get("DisruptionTarget", {})
    beside, init = state_beside(status), init_container(status)
    unplaced = scheduled if scheduled.get("reason") in ("Unschedulable", "SchedulingGated") else {}
    waiting = unplaced or (beside or state).get("waiting", {})
    ended = beside.get("terminated") or terminated
    failed_start = ended if ended.get("reason") in FAILED_STARTS else {}
    ready_since = _ready_since(status, conditions)
    phase = status.get("phase", "Pending")
    # The trainer is never restarted. A container that a webhook added may run on for ever.
    lingers = bool(terminated) and phase not in ("Succeeded", "Failed")
    if terminated and not status.get("reason"):
        phase = "Succeeded" if terminated.get("exitCode") == 0 else "Failed"
    return PodView(
        name=meta["name"],
        uid=meta["uid"],
        sequence=sequence_of(pod),
        capacity_type=_capacity_type(labels),
        template_hash=labels.get(LABEL_TEMPLATE_HASH, ""),
        created_at=_time(meta["creationTimestamp"]),
        phase=phase,
        lingers=lingers,
        ready=_is_true(conditions.get("Ready")) or ready_since is not None,
        ready_since=ready_since,
        node=pod["spec"].get("nodeName"),
        scheduled_at=_transition(scheduled) if _is_true(scheduled) else None,
        ip=status.get("podIP"),
        deleting="deletionTimestamp" in meta,
        deletion_deadline=_time(meta["deletionTimestamp"]) if "deletionTimestamp" in meta else None,
        container=(beside or init).get("name", TRAINER_CONTAINER),
        initializing_since=_time(init["state"]["running"]["startedAt"]) if init and not beside else None,
        waiting_reason=waiting.get("reason") or failed_start.get("reason"),
        waiting_message=quoted(waiting.get("message") or failed_start.get("message")),
        exit_code=ended.get("exitCode"),
        exit_reason=ended.get("reason"),
        exit_message=None if failed_start else last_line(terminated.get("message")),
        unschedulable_since=_transition(unplaced) if unplaced else None,
        kubelet_reason=one_line(status["reason"], most=_MOST_OF_REASON) if status.get("reason") else None,
        kubelet_message=quoted(status.get("message")),
        disruption=_disruption(disrupted),
        disrupted_at=_transition(disrupted) if _is_true(disrupted) else None,
        grace_seconds=float(pod["spec"].get("terminationGracePeriodSeconds", DEFAULT_GRACE_SECONDS)),
        container_started="running" in state or bool(terminated and not failed_start),
        pool=annotations.get(ANNOTATION_POOL),
        pool_hash=annotations.get(ANNOTATION_POOL_HASH),
        group=(pod["spec"].get("schedulingGroup") or {}).get("podGroupName", ""),
        protection={name: annotations[name] for name in PROTECTION if name in annotations},
    )


def refusal(error: RefusedError, job: JobView, known: Refusal | None, now: datetime) -> Refusal:
    """What `error` means for the pods that the job asks for.

    Some refusals pass without an edit of the job: a quota comes free, and an administrator allows what was asked for,
    or mends missing rights or a webhook that is down. All others last until the job changes.

    Args:
        error: The refusal of a pod.
        job: The job whose pod was refused.
        known: The refusal before, if there was one.
        now: Time of the refusal.
    """
    said, generation = str(error), job.metadata_generation
    passing = (_QUOTA, "cannot create resource", "being terminated", "failed calling webhook")
    again = known is not None and known.metadata_generation == generation
    return Refusal(
        metadata_generation=generation,
        message=(
            said
            if isinstance(error, NoPoolError | NotAllowedError)
            else f"Kubernetes refuses the job's pods: {quoted(said)}{_of_defaults(said, job.spec)}"
        ),
        since=known.since if known is not None and again else now,
        lasting=not isinstance(error, NotAllowedError) and not any(text in said for text in passing),
        by_quota=_QUOTA in said and not _is_above_quota(said),
        tried_at=now,
        num_tries=known.num_tries + 1 if known is not None and again else 1,
    )


def _of_defaults(said: str, spec: TrainingJobSpec) -> str:
    """Sentences on requests that are refused, and that the job has not written."""
    by_quota = _OF_QUOTA.search(said)
    names = {match["limited"] or match["most"] for match in _OF_LIMIT_RANGE.finditer(said)}
    names |= {name.removeprefix("requests.") for name in (_amounts(by_quota["requested"]) if by_quota else ())}
    sentences = [
        f"The trainer's request for {name}, {amount}, is spottrain's default: resources.requests.{name} changes it"
        for name, amount in unwritten_requests(spec).items()
        if name in names
    ]
    if unwritten := _UNWRITTEN.search(said):
        sentences.append(f"These are fields of resources: {unwritten['names']}")
    if sentences and spec.resources is None:
        sentences.append(f"A job with resources asks for its GPUs there, too (limits: {GPU})")
    elif GPU in names and spec.resources is None:
        sentences.append(f"A pod asks for {spec.processes_per_node} {GPU}, one for each process")
    if by_quota:
        sentences.append("Raise the quota, or lower nodes.min")
    return "".join(f". {sentence}" for sentence in sentences)


def quoted(said: str | None) -> str | None:
    """What Kubernetes says, on one line and within bounds."""
    return one_line(said, most=_MOST_QUOTED) if said is not None else None


def last_line(said: str | None) -> str | None:
    """The last line of a termination message, within bounds, if it has one."""
    lines = [line for line in (said or "").splitlines() if line.strip()]
    return one_line(lines[-1]) if lines else None


def _is_above_quota(said: str) -> bool:
    """Whether one pod asks for more than the whole quota.

    Then no other pod can make room for it.
    """
    found = _OF_QUOTA.search(said)
    if found is None:
        return False
    limited = _amounts(found["limited"])
    return any(name in limited and amount > limited[name] for name, amount in _amounts(found["requested"]).items())


def _amounts(text: str) -> dict[str, Decimal]:
    """Numbers by name, from "cpu=1,memory=2Gi". Leaves out what can't be read."""
    found = {}
    for name, _, amount in (each.partition("=") for each in text.split(",")):
        with suppress(ValueError):
            found[name] = parse_quantity(amount)
    return found


def sequence_of(pod: Manifest) -> int:
    """The pod's number in its job.

    It is 0 if the label holds none that the operator could have given.
    """
    text = pod["metadata"].get("labels", {}).get(LABEL_SEQUENCE, "")
    return int(text) if text.isdecimal() and len(text) <= _SEQUENCE_DIGITS else 0


def _capacity_type(labels: Manifest) -> CapacityType:
    """How the pod's node is bought.

    It is spot if the label holds nothing that the operator could have given: such a node promises least.
    """
    on_demand = labels.get(LABEL_CAPACITY_TYPE) == CapacityType.ON_DEMAND
    return CapacityType.ON_DEMAND if on_demand else CapacityType.SPOT


def node_view(node: Manifest) -> NodeView:
    meta = node["metadata"]
    conditions = {each["type"]: each for each in node.get("status", {}).get("conditions", ())}
    condition = conditions.get("Ready", {})
    return NodeView(
        name=meta["name"],
        ready=_is_true(condition),
        unready_since=_transition(condition) if not _is_true(condition) else None,
        deleting="deletionTimestamp" in meta,
        taints=tuple(taint["key"] for taint in accepted_taints(node)),
        notice=_notice(meta),
        watcher=meta.get("annotations", {}).get(ANNOTATION_WATCHER, ""),
        labels=meta.get("labels", {}),
    )


def owned_by(pod: Manifest, job_uid: str) -> bool:
    """Whether the job controls the pod. Anyone could have set the labels."""
    owners = pod["metadata"].get("ownerReferences", ())
    return any(owner["uid"] == job_uid and owner.get("controller") for owner in owners)


def _ready_since(status: Manifest, conditions: dict[str, Any]) -> datetime | None:
    """Time since which the trainer is ready; None if it isn't.

    A sidecar that has ended makes its pod unready, but the trainer doesn't need it. On a node that doesn't answer,
    Kubernetes makes the pod unready as well, and leaves ContainersReady as it was.
    """
    if _is_true(conditions.get("Ready")):
        return _transition(conditions["Ready"])
    trainer = trainer_status(status)
    running = trainer.get("state", {}).get("running", {})
    if not trainer.get("ready") or conditions.get("ContainersReady", {}).get("status") != "False":
        return None
    return _time(running["startedAt"]) if "startedAt" in running else None


def _disruption(condition: dict[str, Any]) -> str | None:
    if not _is_true(condition):
        return None
    return one_line(condition.get("reason") or "DisruptionTarget", most=_MOST_OF_REASON)


def _notice(meta: Manifest) -> Notice | None:
    text = meta.get("annotations", {}).get(ANNOTATION_NOTICE)
    if not text:
        return None
    try:
        return Notice.from_json(text)
    except ValidationError as error:
        logger.warning("node %s: its notice can't be read, and is ignored: %s", meta["name"], error)
        return None


def _is_true(condition: dict[str, Any] | None) -> bool:
    return condition is not None and condition.get("status") == "True"


def _transition(condition: dict[str, Any]) -> datetime | None:
    text = condition.get("lastTransitionTime")
    return _time(text) if text else None


def _time(text: str) -> datetime:
    return datetime.fromisoformat(text).astimezone(UTC)
