"""A job takes its profile before anything else, and keeps to the profile's limits.

What it took is in its status, so that a profile that is edited or deleted changes no job that has taken it.
"""

from __future__ import annotations

from spottrain_api.contract.conditions import ConditionReason, ConditionType, EventReason
from spottrain_api.v1alpha1.profile import beyond, with_profile
from spottrain_api.v1alpha1.status import TakenProfile
from spottrain_operator.core.draft import Draft
from spottrain_operator.core.facts.situation import Situation


def waits_for_profile(situation: Situation) -> bool:
    """Whether nothing new starts, no pod and no generation: the job is yet to take its profile."""
    return situation.observed.profile is not None


def take_profile(situation: Situation, draft: Draft) -> Draft:
    """ProfileAccepted: the job takes its profile, unless that is missing or the job is beyond it.

    What it takes counts from the next pass on. An event reports what is wrong.
    """
    offered = situation.observed.profile
    if offered is None:
        return _keep_to_limits(situation, draft)
    if offered.spec is None:
        return _miss(situation, draft, offered.name)
    if wrong := beyond(with_profile(situation.spec, offered.spec), offered.name, offered.spec):
        return _exceed(situation, draft, ". ".join(wrong))
    taken = TakenProfile(name=offered.name, generation=offered.generation, spec=offered.spec)
    return _accept(situation, draft.update(profile=taken), offered.name)


def _keep_to_limits(situation: Situation, draft: Draft) -> Draft:
    """Say which edits the profile's limits have cut back. What runs continues."""
    taken = draft.status.profile
    if taken is None:
        return draft
    if wrong := situation.observed.job.beyond_profile:
        return _exceed(situation, draft, f"{'. '.join(wrong)}. Until then, the job keeps to the limits")
    return _accept(situation, draft, taken.name)


def _miss(situation: Situation, draft: Draft, name: str) -> Draft:
    message = (
        f"There is no TrainingProfile {name}. `kubectl get trainingprofiles` lists them: create it, or create this "
        "job again with the name of another"
    )
    if _is_news(draft, message):
        draft = draft.record(EventReason.PROFILE_MISSING, message, warning=True)
    return draft.condition(ConditionType.PROFILE_ACCEPTED, False, EventReason.PROFILE_MISSING, message, situation.now)


def _exceed(situation: Situation, draft: Draft, message: str) -> Draft:
    if _is_news(draft, message):
        draft = draft.record(EventReason.PROFILE_LIMITS, message, warning=True)
    return draft.condition(ConditionType.PROFILE_ACCEPTED, False, EventReason.PROFILE_LIMITS, message, situation.now)


def _accept(situation: Situation, draft: Draft, name: str) -> Draft:
    message = f"The job has what it takes from profile {name} (status.profile)"
    return draft.condition(
        ConditionType.PROFILE_ACCEPTED, True, ConditionReason.PROFILE_TAKEN, message, situation.now
    )


def _is_news(draft: Draft, message: str) -> bool:
    known = draft.status.condition(ConditionType.PROFILE_ACCEPTED)
    return known is None or (known.status, known.message) != ("False", message)
