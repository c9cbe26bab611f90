"""When to decide again if nothing happens before.

Changes wake the reconciler, but time alone doesn't.
"""

from __future__ import annotations

from spottrain_api.v1alpha1.status import GenerationState, GenerationStatus
from spottrain_operator.core.draft import Draft
from spottrain_operator.core.facts.members import MemberState, members_of, says_nothing
from spottrain_operator.core.facts.pauses import next_share_at, pause_of
from spottrain_operator.core.facts.situation import Situation
from spottrain_operator.core.facts.watching import spot_watches
from spottrain_operator.core.policies.capacity import next_try, refusal_of, spot_again
from spottrain_operator.core.policies.gangs import holds_off
from spottrain_operator.core.policies.profiles import waits_for_profile
from spottrain_operator.core.policies.rivals import rival_of
from spottrain_operator.core.timing import after, seconds_between

# A generation that isn't at rest: patience with members, pods and watchers runs out by the second.
_RESTLESS = 2.0
# While a generation ends, each delay is time without a step.
_ENDING = 0.5
_WAITING = 1.0
_SUSPENDED = 30.0
_BLOCKED = 5.0
# The next pass has what the job has just taken from its profile.
_TAKEN = 0.05


def look_again(situation: Situation, draft: Draft) -> float | None:
    """Seconds until time alone may require a decision. None: never."""
    if situation.observed.job.deleting:
        return _WAITING if situation.pods else None
    if draft.finished:
        return _until_expiry(situation, draft)
    running = draft.running
    if running is not None:
        return _while_running(situation, draft, running)
    if pause_of(situation) is not None and not situation.pods:
        return _SUSPENDED
    if situation.observed.profile is not None and draft.status.profile is not None:
        return _TAKEN
    waits = rival_of(situation, draft) is not None or holds_off(situation, draft) or waits_for_profile(situation)
    if waits and not situation.pods:
        return _BLOCKED
    return _WAITING


def _while_running(situation: Situation, draft: Draft, generation: GenerationStatus) -> float:
    if generation.state is not GenerationState.ACTIVE:
        return _ENDING
    if not _is_at_rest(situation, generation):
        return _RESTLESS
    status, limit = draft.status, situation.spec.run_policy.active_deadline_seconds
    record = situation.next_record(status.accounted_at or situation.now)
    times = [record if record > situation.now else situation.next_record(situation.now)]
    if limit is not None and status.start_time is not None:
        times.append(after(status.start_time, limit))
    # Later, only something else can end the fallback, such as another price.
    if status.fallback_since is not None and (again := spot_again(situation, draft)) > situation.now:
        times.append(again)
    if due := next_share_at(situation):
        times.append(due)
    if refusal := refusal_of(situation, draft):
        times.append(next_try(refusal, situation.timing))
    return max(_RESTLESS, min(seconds_between(situation.now, each) for each in times))


def _is_at_rest(situation: Situation, generation: GenerationStatus) -> bool:
    """Whether only an event can change the decision.

    Either all pods are members that are there and make steps. An agent reports at once that steps no longer come, and
    the end of its connection shows that it is gone. Or a new operator has heard none of them yet, and no node is
    lost: no silence counts before it hears one.
    """
    members = members_of(situation, generation)
    starting = generation.first_step_at is None and not says_nothing(situation, generation)
    if starting or situation.pods.keys() != {m.member.pod_uid for m in members}:
        return False
    if not situation.observed.reports:
        return all(
            m.state is MemberState.AWAITED
            and m.facts is not None
            and m.facts.coming_loss is None
            and not m.facts.node_lost
            for m in members
        )
    watches = spot_watches(generation, situation.observed.reports, situation.timing)
    return all(each.settled for each in watches) and all(
        m.state is MemberState.RUNNING
        and m.facts is not None
        and m.facts.silence < situation.timing.just_now
        and m.facts.coming_loss is None
        and not (m.report is not None and m.report.stalled)
        for m in members
    )


def _until_expiry(situation: Situation, draft: Draft) -> float | None:
    if any(not facts.ended for facts in situation.pods.values()):
        return _WAITING
    ttl, completed = situation.spec.run_policy.ttl_seconds_after_finished, draft.status.completion_time
    if ttl is None or completed is None:
        return None
    return max(_WAITING, ttl - seconds_between(completed, situation.now))
