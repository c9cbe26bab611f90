"""Deletes pods that are no longer of use, and expired jobs.

A finished job expires after its time to live.
"""

from __future__ import annotations

from datetime import datetime

from spottrain_api.contract.causes import Cause
from spottrain_api.v1alpha1.spec import CleanPodPolicy
from spottrain_operator.core.draft import Draft
from spottrain_operator.core.facts.pauses import pause_of
from spottrain_operator.core.facts.places import places
from spottrain_operator.core.facts.pools import asks_for_current_nodes
from spottrain_operator.core.facts.situation import BUSY, PodFacts, Situation
from spottrain_operator.core.model import CANNOT_START, DeleteJob, DeletePod
from spottrain_operator.core.policies.failure_policy import start_failures
from spottrain_operator.core.policies.gangs import holds_off
from spottrain_operator.core.policies.rivals import rival_of
from spottrain_operator.core.timing import seconds_between

_PAUSED = {
    Cause.SUSPENDED: "the job is suspended",
    Cause.BUDGET_SPENT: "the job's budget is spent",
    Cause.SPOT_IS_DEAR: "the job waits for a lower price of spot nodes",
    Cause.QUOTA_TAKEN: "Kueue grants the job no nodes",
}


def delete_useless(situation: Situation, draft: Draft) -> Draft:
    """Delete pods that no generation can use, except members of a running generation."""
    running = draft.running
    training = {m.pod_uid for m in running.members} if running is not None else set()
    evidence = {f.pod.uid for f in start_failures(situation, draft)}
    found = places(situation, draft.status)
    kept = {*found.kept, *found.prewarmed}
    for uid, facts in situation.pods.items():
        if uid in training or uid in evidence:
            continue
        reason = "it is being deleted" if facts.pod.deleting else _useless(situation, draft, facts, uid in kept)
        if reason is not None:
            draft = _delete(situation, draft, facts, reason)
    return draft


def delete_pods_of_finished(situation: Situation, draft: Draft) -> Draft:
    """Delete the pods of a finished job, except those that keep logs.

    A pod that has ended may be asked for its log.
    """
    for facts in situation.pods.values():
        if _keeps_log(situation, draft, facts):
            continue
        draft = _delete(situation, draft, facts, f"the job has ended ({draft.status.phase.value})")
    return draft


def delete_all(situation: Situation, draft: Draft) -> Draft:
    """Delete the pods of a job that is being deleted.

    Unless the user asks for a foreground deletion, Kubernetes waits until the job is gone. Pods that are to be
    orphaned end by themselves, and stay with their logs.
    """
    if situation.observed.job.orphans_pods:
        return draft
    for facts in situation.pods.values():
        draft = _delete(situation, draft, facts, "the job is being deleted")
    return draft


def _keeps_log(situation: Situation, draft: Draft, facts: PodFacts) -> bool:
    """Whether the pod stays for its log.

    It has failed, or it was in the last generation, and all its containers have ended or are about to end.
    """
    if situation.spec.run_policy.clean_pod_policy is CleanPodPolicy.ALL or facts.unreachable or facts.pod.deleting:
        return False
    generation, completed = draft.status.generation, draft.status.completion_time
    was_member = generation is not None and any(m.pod_uid == facts.pod.uid for m in generation.members)
    if not was_member and facts.pod.phase != "Failed":
        return False
    return facts.ended or (completed is not None and not _longer_than(situation.timing.leave, completed, situation))


def expire(situation: Situation, draft: Draft) -> Draft:
    """Delete a finished job after ttlSecondsAfterFinished."""
    ttl, completed = situation.spec.run_policy.ttl_seconds_after_finished, draft.status.completion_time
    if ttl is None or completed is None or seconds_between(completed, situation.now) < ttl:
        return draft
    reason = f"it finished {ttl} s ago (runPolicy.ttlSecondsAfterFinished)"
    return draft.act(DeleteJob(uid=situation.observed.job.uid, reason=reason))


def _delete(situation: Situation, draft: Draft, facts: PodFacts, reason: str) -> Draft:
    """Delete a pod.

    If its node is gone, nobody would confirm that, so its object is removed at once. Containers that still run have
    the pod's grace period.
    """
    pod = facts.pod
    grace = 0 if facts.unreachable or facts.ended else None
    if pod.deleting:
        overdue = pod.deletion_deadline is None or pod.deletion_deadline < situation.now
        if grace is None or not (facts.unreachable and overdue):
            return draft
    return draft.act(DeletePod(name=pod.name, uid=pod.uid, reason=reason, grace_seconds=grace))


def _useless(situation: Situation, draft: Draft, facts: PodFacts, kept: bool) -> str | None:
    """Why to delete a pod that isn't in a running generation; None to keep it."""
    if unwanted := _wants_none(situation, draft):
        return unwanted
    if facts.finished:
        return "its container has ended"
    if facts.device_failed:
        return "a device of its node failed"
    if not facts.current:
        return "it was made from an older template"
    if _waits_for_old_pool(situation, facts):
        return "it waits for nodes of a pool that was edited or removed"
    is_overdue = _longer_than(situation.timing.stuck_start, facts.pod.placed_at, situation)
    if facts.unreachable and (not facts.node_was_lost or is_overdue):
        return "its node is gone or not ready"
    if facts.coming_loss is not None and (not facts.holds_place or is_overdue):
        return facts.coming_loss.message
    if not kept and facts.coming_loss is None and _knows_notices(situation):
        return "the job has enough pods"
    return _stuck(situation, draft, facts)


def _wants_none(situation: Situation, draft: Draft) -> str | None:
    """Why the job wants no pods at present."""
    if (pause := pause_of(situation)) is not None:
        return _PAUSED[pause.cause]
    if rival_of(situation, draft) is not None:
        return "the job waits for another one"
    if holds_off(situation, draft):
        return "the job can't get as many nodes as it needs, and gives them back"
    return None


def _knows_notices(situation: Situation) -> bool:
    """Whether the agents have had the time to report their notices.

    To a new operator, the replacement of a pod whose node goes is one pod too many.
    """
    return (
        seconds_between(situation.observed.listening_since, situation.now) >= situation.timing.operator_restart_grace
    )


def _waits_for_old_pool(situation: Situation, facts: PodFacts) -> bool:
    """A pod with a node stays: what trains doesn't depend on the pool."""
    if facts.pod.node is not None or situation.observed.job.left_out:
        return False
    return not asks_for_current_nodes(facts.pod, situation.spec)


def _stuck(situation: Situation, draft: Draft, facts: PodFacts) -> str | None:
    pod, generation = facts.pod, draft.status.generation
    if pod.waiting_reason in CANNOT_START and _longer_than(situation.timing.stuck_start, pod.stuck_since, situation):
        return f"its container can't start ({pod.waiting_reason})"
    if generation is None:
        return None
    # A pod that never reported is kept: its agent may not reach the operator, and neither would the next one's.
    spoke = facts.report is not None or any(m.pod_uid == pod.uid for m in generation.members)
    if spoke and pod.ready and facts.silence > situation.timing.silent_alone and situation.hears_someone_but(pod.uid):
        return "its agent doesn't answer while others do"
    busy = facts.report is not None and facts.report.phase in BUSY
    if busy and _longer_than(situation.timing.stray, generation.ended_at or generation.started_at, situation):
        return "its agent still runs an earlier generation"
    return None


def _longer_than(seconds: float, since: datetime, situation: Situation) -> bool:
    return seconds_between(since, situation.now) > seconds
