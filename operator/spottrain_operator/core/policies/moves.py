"""Moves to a cheaper pool: a pod asks there whether nodes have come back, and others follow it.

They wait warm beside the members. Growth decides when they join.
"""

from __future__ import annotations

from spottrain_api.contract.assignments import CapacityType
from spottrain_api.contract.conditions import ConditionType, EventReason
from spottrain_api.v1alpha1.status import GenerationState
from spottrain_operator.core.draft import Draft
from spottrain_operator.core.facts.moves import movers, paid, paid_by_members, saving_pays
from spottrain_operator.core.facts.places import places
from spottrain_operator.core.facts.queue import granted
from spottrain_operator.core.facts.situation import PodFacts, Situation
from spottrain_operator.core.model import DeletePod
from spottrain_operator.core.policies.capacity import create, missing, patience
from spottrain_operator.core.policies.pool_choice import avoid_dry_pools, pools_by_preference
from spottrain_operator.core.timing import after, seconds_between
from spottrain_runtime.wording import counted


def move(situation: Situation, draft: Draft) -> Draft:
    """Create pods in a cheaper pool than members are in, if the rest of the job saves more than a restart costs.

    The first one asks for a node alone. If it gets none, the pool is avoided for a while, and then asked again.
    """
    generation, status = draft.running, draft.status
    if generation is None or generation.state is not GenerationState.ACTIVE or generation.first_step_at is None:
        return draft
    healthy = status.condition(ConditionType.CHECKPOINTS_HEALTHY)
    if status.fallback_since is not None or (healthy is not None and healthy.status == "False"):
        return draft
    if situation.refusal is not None or situation.observed.job.left_out or missing(situation, draft):
        return draft
    if granted(situation) is not None:
        return draft  # Kueue counts no pod beyond the job's places
    members = {m.pod_uid for m in generation.members}
    if not members.issuperset(places(situation, status, leaving=draft.leaving).kept):
        return draft  # the next restart is for others
    spare = [f for uid, f in situation.pods.items() if uid not in members | draft.leaving and f.usable]
    for kind in CapacityType:
        draft = _move(situation, draft, kind, [f for f in spare if f.pod.capacity_type is kind])
    return draft


def _move(situation: Situation, draft: Draft, kind: CapacityType, spare: list[PodFacts]) -> Draft:
    waiting = [f for f in movers(situation, draft.status, spare) if f.pod.node is None]
    if dry := [f.pod for f in waiting if _is_dry(situation, f)]:
        until = after(situation.now, situation.timing.pool_avoidance)
        reason = "its cheaper pool has no node for it"
        draft = draft.act(*(DeletePod(name=pod.name, uid=pod.uid, reason=reason) for pod in dry))
        return avoid_dry_pools(situation, draft, dry, until=until)
    wanted = _wanted(situation, draft, kind)
    if wanted is None:
        return draft
    pool, number = wanted
    if not any(f.pod.pool == pool and f.pod.node is not None for f in spare):
        number = 1
    number -= sum(f.pod.pool == pool for f in spare)
    if number <= 0:
        return draft
    draft = create(situation, draft, [(kind, pool)] * number)
    text = f"Creating {counted(number, f'{kind.value} pod')} in pool {pool}, which is cheaper than that of members"
    return draft.record(EventReason.PODS_CREATED, text)


def _wanted(situation: Situation, draft: Draft, kind: CapacityType) -> tuple[str, int] | None:
    """The best pool of a type that isn't avoided, and how many members' nodes are dearer; None if no move pays."""
    generation = draft.running
    assert generation is not None
    avoided = {each.name for each in draft.status.avoided_pools if each.capacity_type == kind.value}
    names = [name for name in pools_by_preference(situation, draft, kind) if name not in avoided]
    if not names:
        return None
    before = paid_by_members(situation, generation, kind)
    price = paid(situation, kind, names[0])
    dearer = [each for each in before if each > price]
    now_paid = sum(sum(paid_by_members(situation, generation, each)) for each in CapacityType)
    if not saving_pays(situation, draft.status, sum(dearer) - price * len(dearer), now_paid):
        return None
    return names[0], len(dearer)


def _is_dry(situation: Situation, facts: PodFacts) -> bool:
    since = facts.pod.unschedulable_since
    return since is not None and seconds_between(since, situation.now) >= patience(situation, facts.pod)
