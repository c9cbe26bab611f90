"""The decision: an ordered list of policies.

Each sees the situation, and what the policies before it decided.
"""

from __future__ import annotations

from datetime import datetime

from spottrain_operator.core.draft import Draft, Policy
from spottrain_operator.core.facts.situation import Situation
from spottrain_operator.core.model import Observed, Plan
from spottrain_operator.core.policies import (
    accounting,
    budget,
    capacity,
    cleanup,
    conditions,
    devices,
    ending,
    failure_policy,
    gangs,
    growth,
    lifecycle,
    membership,
    moves,
    pool_choice,
    preemption,
    profiles,
    protection,
    provisioning,
    punctuality,
    queueing,
    recording,
    restored,
    rhythm,
    rivals,
    transitions,
    understanding,
)

# Facts come first (of these, which generation runs), then what ends a generation (the strongest reason first), then
# the next generation, and the pods last. A policy that finishes the job ends the list.
POLICIES: tuple[Policy, ...] = (
    restored.handle_restored_status,
    recording.record_commit,
    recording.record_progress,
    accounting.account,
    transitions.fill_transitions,
    membership.succeed,
    preemption.handle_notices,
    devices.avoid_failed_devices,
    preemption.handle_losses,
    pool_choice.avoid_reclaimed_pools,
    failure_policy.handle_failures,
    failure_policy.handle_hang,
    failure_policy.handle_pods_that_cannot_start,
    lifecycle.handle_user,
    growth.grow,
    membership.enforce_deadline,
    membership.conclude,
    lifecycle.end_at_deadline,
    understanding.handle_unknown_fields,
    profiles.take_profile,
    rivals.give_way,
    membership.start_next,
    gangs.give_back,
    capacity.fall_back,
    cleanup.delete_useless,
    capacity.leave_dry_pools,
    capacity.create_missing,
    moves.move,
    protection.protect_members,
    budget.watch_budget,
    punctuality.watch_deadline,
    queueing.ask_for_quota,
    provisioning.make_node_pools,
    conditions.describe,
)
# A finished job holds no nodes, and is deleted after its time to live.
FINISHED_POLICIES: tuple[Policy, ...] = (
    accounting.charge_finished,
    cleanup.delete_pods_of_finished,
    queueing.finish,
    provisioning.finish,
    rivals.give_way,
    conditions.describe_finished,
    lifecycle.report_ignored_edit,
    cleanup.expire,
)
# A job that is being deleted may stay for long, until others have removed their finalizers.
DELETED_POLICIES: tuple[Policy, ...] = (
    recording.record_commit,
    ending.end_with_job,
    accounting.account,
    cleanup.delete_all,
    conditions.describe,
)


def plan(observed: Observed, now: datetime) -> Plan:
    """Decide what to do about one job. Pure: the same input gives the same plan.

    Args:
        observed: The job with everything that a decision needs.
        now: Time of the decision.
    """
    job = observed.job
    situation = Situation(observed, now)
    if job.deleting:
        return _leave(situation)
    decided = _decide(situation, records=situation.records)
    if decided.status == job.status or situation.records:
        return decided
    # It is going to be written, so progress, time and cost go with it.
    return _decide(situation, records=True)


def decides(observed: Observed, now: datetime) -> bool:
    """Whether the plan for this time changes anything. It takes less time than the plan itself."""
    job, situation = observed.job, Situation(observed, now)
    first = _leave(situation) if job.deleting else _decide(situation, records=situation.records)
    return bool(first.actions or first.events or first.status != job.status)


def _decide(situation: Situation, *, records: bool) -> Plan:
    job = situation.observed.job
    draft = Draft(status=job.status, records=records)
    for policy in POLICIES:
        if draft.finished:
            break
        draft = policy(situation, draft)
    if draft.finished:
        for policy in FINISHED_POLICIES:
            draft = policy(situation, draft)
    if draft.status.observed_generation != job.metadata_generation:
        draft = draft.update(observed_generation=job.metadata_generation)
    return _plan_of(situation, draft)


def _leave(situation: Situation) -> Plan:
    """Decide about a job that is being deleted: it stops, as one does that is gone.

    Its cost is recorded until its pods are gone.
    """
    draft = Draft(status=situation.observed.job.status, records=situation.records)
    holds_pods = bool(situation.pods or situation.given_back) or draft.running is not None
    for policy in DELETED_POLICIES if holds_pods and not draft.finished else (cleanup.delete_all,):
        draft = policy(situation, draft)
    return _plan_of(situation, draft)


def _plan_of(situation: Situation, draft: Draft) -> Plan:
    return Plan(
        status=draft.status,
        actions=draft.actions,
        events=draft.events,
        requeue_after=rhythm.look_again(situation, draft),
        held=situation.held,
    )
