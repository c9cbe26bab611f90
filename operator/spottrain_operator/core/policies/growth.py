"""Growth: a drain admits pods that wait, warm.

Such drains are rare, admit many pods at a time, and happen only if they pay.
"""

from __future__ import annotations

from datetime import datetime

from spottrain_api.contract.causes import Cause
from spottrain_api.contract.conditions import ConditionType
from spottrain_api.v1alpha1.status import GenerationState, GenerationStatus
from spottrain_operator.core.draft import Draft
from spottrain_operator.core.facts.members import members_of, says_nothing
from spottrain_operator.core.facts.moves import paid, saving_pays
from spottrain_operator.core.facts.places import places
from spottrain_operator.core.facts.restarts import restart_seconds
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
    if any(m.is_done for m in members_of(situation, generation)):
        return draft
    members = {m.pod_uid for m in generation.members}
    kept = places(situation, draft.status, between_generations=True).kept
    ready = [f for uid in kept if (f := situation.pods[uid]).candidate or uid in members]
    next_ones = ready[: situation.spec.nodes.max]
    waiting = [f for f in next_ones if f.pod.uid not in members]
    if not waiting or not _pays(situation, draft, generation, next_ones):
        return draft
    if not _is_time(situation, draft, waiting, coming(situation, set(kept) - members), len(next_ones)):
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


def _pays(situation: Situation, draft: Draft, generation: GenerationStatus, next_ones: list[PodFacts]) -> bool:
    """Whether the rest of the job gains more than the restart costs.

    A larger generation saves time: a step of twice as many nodes takes half as long. One of the same size saves
    money. If nobody knows how long the job still takes, it gains.
    """
    if len(next_ones) > len(generation.members):
        remaining = draft.status.progress.eta_seconds
        share = 1 - len(generation.members) / len(next_ones)
        return remaining is None or remaining * share > restart_seconds(draft.status)
    pools = {uid: facts.pod.pool for uid, facts in situation.pods.items()}
    now_paid = sum(paid(situation, m.capacity_type, pools.get(m.pod_uid)) for m in generation.members)
    then_paid = sum(paid(situation, f.pod.capacity_type, f.pod.pool) for f in next_ones)
    return saving_pays(situation, draft.status, now_paid - then_paid, now_paid)


def _is_time(situation: Situation, draft: Draft, waiting: list[PodFacts], others: list[PodFacts], size: int) -> bool:
    """Whether to wait no longer for pods that may join with the same restart."""
    timing = situation.timing
    since = sorted(f.pod.ready_since or f.pod.created_at for f in waiting)
    waited = seconds_between(since[0], situation.now)
    expected = any(f.usable and f.pod.node is None for f in situation.pods.values())
    if not others and not expected:
        return True
    if waited <= (timing.growth_patience_while_coming if others else timing.growth_patience):
        return False
    return waited > timing.growth_longest or not _next_is_worth_it(situation, draft, since, size)


def _next_is_worth_it(situation: Situation, draft: Draft, since: list[datetime], size: int) -> bool:
    """Whether the wait for one more pod costs less than a restart for it alone.

    Until it comes, the pods that wait do nothing. A restart stops all. The next one is as far away as those that wait
    were from each other, or as the last one is by now.

    Args:
        situation: The job at one moment.
        draft: What was decided so far.
        since: Since when each pod waits, in order.
        size: The number of members if those that wait join.
    """
    between = seconds_between(since[0], since[-1]) / max(1, len(since) - 1)
    gap = max(between, seconds_between(since[-1], situation.now))
    return gap * len(since) < restart_seconds(draft.status) * size
