"""Growth: a drain admits pods that wait, warm.

Such drains are rare, admit many pods at a time, and happen only if they pay.
"""

from __future__ import annotations

from spottrain_api.contract.causes import Cause
from spottrain_api.contract.conditions import ConditionType
from spottrain_api.v1alpha1.status import GenerationState
from spottrain_operator.core.draft import Draft
from spottrain_operator.core.facts.members import members_of, says_nothing
from spottrain_operator.core.facts.places import places
from spottrain_operator.core.facts.situation import PodFacts, Situation
from spottrain_operator.core.policies.ending import request_end
from spottrain_operator.core.timing import seconds_between
from spottrain_runtime.wording import listed


def grow(situation: Situation, draft: Draft) -> Draft:
    """Drain the running generation for a larger or cheaper one.

    While saves fail, it continues, because a drain would lose steps. After its session, a script has nothing to gain.
    """
    generation = draft.running
    if generation is None or generation.state is not GenerationState.ACTIVE:
        return draft
    healthy = draft.status.condition(ConditionType.CHECKPOINTS_HEALTHY)
    if healthy is not None and healthy.status == "False":
        return draft
    since = generation.started_at if says_nothing(situation, generation) else generation.first_step_at
    if since is None or seconds_between(since, situation.now) < situation.timing.growth_interval:
        return draft
    remaining = draft.status.progress.eta_seconds
    if remaining is not None and remaining < situation.timing.growth_min_remaining:
        return draft
    if any(m.is_done for m in members_of(situation, generation)):
        return draft
    members = {m.pod_uid for m in generation.members}
    kept = places(situation, draft.status, between_generations=True).kept
    waiting = [f for f in situation.candidates(kept) if f.pod.uid not in members]
    if not waiting or not _is_time(situation, waiting, coming(situation, set(kept) - members)):
        return draft
    names = listed([f.pod.name for f in waiting])
    return request_end(situation, draft, members_of(situation, generation), Cause.GROW, f"{names} can join")


def coming(situation: Situation, uids: set[str]) -> list[PodFacts]:
    """Those of `uids` that will be candidates soon.

    They have a node, or are just being scheduled.
    """
    return [
        facts
        for uid in uids
        if not (facts := situation.pods[uid]).candidate
        and facts.usable
        and not (facts.pod.ready and facts.received_at is not None and not facts.heard)
        and (
            facts.pod.node is not None
            or seconds_between(facts.pod.created_at, situation.now) < situation.timing.scheduling
        )
    ]


def _is_time(situation: Situation, waiting: list[PodFacts], others: list[PodFacts]) -> bool:
    waited = max(seconds_between(f.pod.ready_since or f.pod.created_at, situation.now) for f in waiting)
    if others:
        return waited > situation.timing.growth_patience_while_coming
    expected = any(f.usable and f.pod.node is None for f in situation.pods.values())
    return not expected or waited > situation.timing.growth_patience
