"""The user's requests for the whole job: suspension, a deadline, new settings."""

from __future__ import annotations

from spottrain_api.contract.causes import Cause
from spottrain_api.contract.conditions import EventReason
from spottrain_api.v1alpha1.status import FINISHED_PHASES, GenerationState, GenerationStatus, Phase
from spottrain_operator.core.draft import Draft
from spottrain_operator.core.facts.members import members_of
from spottrain_operator.core.facts.pauses import pause_of
from spottrain_operator.core.facts.places import places
from spottrain_operator.core.facts.queue import evicted, taken_sentence
from spottrain_operator.core.facts.situation import Situation
from spottrain_operator.core.policies.ending import AGAIN, finish, request_end
from spottrain_operator.core.timing import seconds_between

_TRAIN_ON = (
    "To train on, raise the script's steps, and apply the job under another name; its commits replace the old ones. "
    "For a fresh run, create a new job with a different checkpoint.uri"
)


def handle_user(situation: Situation, draft: Draft) -> Draft:
    """Drain the running generation if the user wants a different one, or none."""
    generation = draft.running
    if generation is None or generation.state is not GenerationState.ACTIVE:
        return draft
    cause, message = _wish(situation, draft, generation)
    if cause is None:
        return draft
    return request_end(situation, draft, members_of(situation, generation), cause, message)


def _wish(situation: Situation, draft: Draft, generation: GenerationStatus) -> tuple[Cause | None, str]:
    policy = situation.spec.run_policy
    if is_past_deadline(situation, draft):
        return (
            Cause.DEADLINE_EXCEEDED,
            f"runPolicy.activeDeadlineSeconds ({policy.active_deadline_seconds}) has passed",
        )
    if (pause := pause_of(situation)) is not None:
        return pause.cause, pause.why
    if generation.template_hash != situation.run_hash and not situation.keeps_old_pods:
        return Cause.EDITED, "the job was edited"
    kept = places(situation, draft.status).kept
    surplus = [m.pod for m in generation.members if m.pod_uid not in kept and _holds_place(situation, m.pod_uid)]
    if surplus and (workload := evicted(situation)) is not None:
        return Cause.QUOTA_TAKEN, taken_sentence(workload)
    if surplus:
        return Cause.SCALE_DOWN, f"the job's limits leave no place for {', '.join(surplus)}"
    return None, ""


def _holds_place(situation: Situation, uid: str) -> bool:
    facts = situation.pods.get(uid)
    return facts is not None and facts.holds_place


def is_past_deadline(situation: Situation, draft: Draft) -> bool:
    """Whether the job has run for longer than it may.

    The time counts from its first generation.
    """
    limit, since = situation.spec.run_policy.active_deadline_seconds, draft.status.start_time
    return limit is not None and since is not None and seconds_between(since, situation.now) > limit


def end_at_deadline(situation: Situation, draft: Draft) -> Draft:
    """Fail a job that has drained after its deadline. Its newest commit stays."""
    if draft.running is not None or not is_past_deadline(situation, draft):
        return draft
    limit = situation.spec.run_policy.active_deadline_seconds
    message = f"The job has not finished within runPolicy.activeDeadlineSeconds ({limit}): raise it, or remove it"
    return finish(situation, draft, Phase.FAILED, Cause.DEADLINE_EXCEEDED, message)


def report_ignored_edit(situation: Situation, draft: Draft) -> Draft:
    """Say that an edit does not start a finished job again."""
    job = situation.observed.job
    seen = job.status.observed_generation
    if job.status.phase not in FINISHED_PHASES or seen in (0, job.metadata_generation):
        return draft
    how, again = ("failed", AGAIN) if job.status.phase is Phase.FAILED else ("succeeded", _TRAIN_ON)
    message = f"The job has {how}, and an edit does not start it again. {again}"
    return draft.record(EventReason.EDIT_IGNORED, message, warning=True)
