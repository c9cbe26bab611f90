"""Which pods are created: for which free places, and in which pools.

If spot nodes don't come, on-demand nodes stand in, and a pod leaves a pool without capacity.
"""

from __future__ import annotations

from datetime import datetime
from itertools import pairwise

from spottrain_api.contract.assignments import CapacityType
from spottrain_api.contract.conditions import EventReason
from spottrain_api.v1alpha1.capacity import FallbackPolicy
from spottrain_api.v1alpha1.spec import TrainingJobSpec
from spottrain_operator.core.draft import Draft
from spottrain_operator.core.facts.deadline import deadline_of, hurries, stays_on_demand, waits_for_spot
from spottrain_operator.core.facts.dear_spot import saves_nothing
from spottrain_operator.core.facts.demand import demand
from spottrain_operator.core.facts.interruptions import unrest
from spottrain_operator.core.facts.pauses import pause_of
from spottrain_operator.core.facts.places import demand_of, places
from spottrain_operator.core.facts.pools import asks_for_current_nodes, pool_sentence, pools_have
from spottrain_operator.core.facts.situation import Situation
from spottrain_operator.core.model import CreatePod, DeletePod, KeptAway, PodView, Refusal
from spottrain_operator.core.policies.devices import avoided_nodes
from spottrain_operator.core.policies.failure_policy import start_failures
from spottrain_operator.core.policies.gangs import holds_off
from spottrain_operator.core.policies.pool_choice import avoid_dry_pools, pools_by_preference
from spottrain_operator.core.policies.profiles import waits_for_profile
from spottrain_operator.core.policies.rivals import rival_of
from spottrain_operator.core.policies.understanding import waits_to_be_understood
from spottrain_operator.core.timing import Timing, after, growing_pause, seconds_between
from spottrain_operator.core.words.scheduling import (
    lacks_labelled_node,
    lacks_more_than_nodes,
    nodes_kept_away,
    scheduler_advice,
)
from spottrain_runtime.wording import counted, listed, time_of_day

# A job whose spot pods are refused each time tries them again after so many times returnAfterSeconds at most.
_LONGEST_RETURN = 8


def retries_sentence(timing: Timing) -> str:
    """How often refused pods are tried again."""
    return f"The operator retries at least every {timing.refusal_max_pause:.0f} s"


def fall_back(situation: Situation, draft: Draft) -> Draft:
    """If spot pods wait too long for a node, or are taken too often, fall back to on-demand.

    After a while, try spot again; earlier if the on-demand pods wait as long for a node, and no generation runs, or
    if an edit leaves on-demand nodes no place.
    """
    status, now, fallback = draft.status, situation.now, situation.spec.capacity.fallback
    if status.fallback_since is not None:
        allowed = may_fall_back(situation.spec) or situation.observed.job.left_out
        early = now < spot_again(situation, draft) or saves_nothing(situation)
        if allowed and early and not waits_for_spot(situation):
            return draft
        draft = draft.update(fallback_since=None, spot_pending_since=None)
        return draft.record(EventReason.SPOT_RETRIED, "The job tries spot nodes again")
    draft = _forget_refusals(situation, draft)
    since = _spot_waits_since(situation, draft)
    if since != status.spot_pending_since:
        draft = draft.update(spot_pending_since=since)
    if not may_fall_back(situation.spec) or waits_for_spot(situation):
        return draft
    if (found := unrest(situation, status)) is not None:
        draft = draft.update(fallback_since=now)
        text = f"Interruptions have taken {found.share_lost:.0%} of the job's last hour, more than spot nodes save"
        message = f"{text}: on-demand nodes take the place of those that go"
        return draft.record(EventReason.FELL_BACK, message, warning=True)
    if since is None or seconds_between(since, now) < _patience(situation, draft):
        return draft
    # Another pool is first when spot is tried again.
    until = after(now, fallback.return_after_seconds + situation.timing.pool_avoidance)
    waiting = [pod for pod in _kept(situation, draft) if pod.unschedulable_since is not None]
    refused = draft.status.refused_spot + 1 if _refused_spot(situation, draft) is not None else 0
    draft = avoid_dry_pools(situation, draft, waiting, until=until)
    draft = draft.update(fallback_since=now, refused_spot=refused)
    text = f"The job has {_spot_nodes(situation, draft)} after {seconds_between(since, now):.0f} s"
    message = f"{text}: on-demand nodes take the place of the others"
    return draft.record(EventReason.FELL_BACK, message, warning=True)


def _patience(situation: Situation, draft: Draft) -> float:
    """How long spot pods wait for a node before on-demand nodes stand in.

    They don't if the job has no time to lose, and fewer nodes than it wants.
    """
    placed = sum(pod.node is not None for pod in _kept(situation, draft))
    if hurries(situation) and placed < demand_of(situation).total:
        return 0.0
    return situation.spec.capacity.fallback.after_seconds


def _spot_waits_since(situation: Situation, draft: Draft) -> datetime | None:
    """Since when a spot pod waits for a node, or can't be created for a quota of its own; None if none does."""
    spot = (pod for pod in _kept(situation, draft) if pod.capacity_type is CapacityType.SPOT)
    waits = [pod.unschedulable_since for pod in spot if not lacks_more_than_nodes(pod)]
    if (refusal := _refused_spot(situation, draft)) is not None:
        waits.append(refusal.since)
    return min((since for since in waits if since is not None), default=None)


def _refused_spot(situation: Situation, draft: Draft) -> Refusal | None:
    """Why spot pods alone can't be created at present."""
    refusal = refusal_of(situation, draft)
    if refusal is None or refusal.lasting or refusal.capacity_types != {CapacityType.SPOT}:
        return None
    return refusal


def _forget_refusals(situation: Situation, draft: Draft) -> Draft:
    """Once the job has all its spot nodes, the next fallback is the first again."""
    if not draft.status.refused_spot or _num_spot_nodes(situation, draft) < demand_of(situation).spot:
        return draft
    return draft.update(refused_spot=0)


def _kept(situation: Situation, draft: Draft) -> list[PodView]:
    """The pods that keep their place."""
    return [situation.pods[uid].pod for uid in places(situation, draft.status, leaving=draft.leaving).kept]


def spot_again(situation: Situation, draft: Draft) -> datetime:
    """When a job that fell back tries spot nodes again."""
    status, fallback = draft.status, situation.spec.capacity.fallback
    assert status.fallback_since is not None
    first = fallback.return_after_seconds
    pause = growing_pause(max(1, status.refused_spot), first=first, most=_LONGEST_RETURN * first)
    back = after(status.fallback_since, pause)
    if (deadline := deadline_of(situation)) is not None and stays_on_demand(situation):
        return max(back, deadline.by)
    if (found := unrest(situation, status)) is not None:
        return max(back, found.until)
    stand_ins = (f.pod for f in situation.pods.values() if f.pod.capacity_type is CapacityType.ON_DEMAND)
    waits = [pod.unschedulable_since for pod in stand_ins if pod.unschedulable_since is not None]
    if draft.running is not None or not waits:
        return back
    return min(back, after(max(min(waits), status.fallback_since), fallback.after_seconds))


def may_fall_back(spec: TrainingJobSpec) -> bool:
    """Whether on-demand nodes may stand in for spot nodes."""
    wanted = demand(spec)
    return spec.capacity.fallback.policy is FallbackPolicy.ON_DEMAND and wanted.max_on_demand > wanted.on_demand


def spot_sentence(situation: Situation, draft: Draft) -> str:
    """How many spot nodes the job has, and when that changes.

    It says when on-demand nodes stand in, or when spot nodes are tried again. Empty if no pod waits.
    """
    since, spec = draft.status.spot_pending_since, situation.spec
    if draft.finished:
        return ""
    if draft.status.fallback_since is not None:
        return _stand_ins_sentence(situation, draft, draft.status.fallback_since)
    if since is None:
        return ""
    text = f"The job has {_spot_nodes(situation, draft)}"
    if demand(spec).on_demand == 0:
        text += ", and asks for no on-demand nodes yet" if may_fall_back(spec) else ", and asks for no others"
    if may_fall_back(spec):
        if waits_for_spot(situation):
            return f"{text}. None stand in while there is time to wait for spot nodes (capacity.finishBy)"
        due = after(since, spec.capacity.fallback.after_seconds)
        text += f". On-demand nodes stand in from {time_of_day(due, situation.now)} (capacity.fallback)"
        waiting = [f.pod for f in situation.pods.values() if f.pod.unschedulable_since is not None]
        if all(lacks_only_spot(situation, pod) for pod in waiting):
            change = "raise" if spec.capacity.on_demand.floor(spec.nodes.max) else "set"
            return f"{text}. To have them at once, {change} capacity.onDemand.min"
        return f"{text}, if any fits"
    if spec.capacity.fallback.policy is FallbackPolicy.NONE:
        return f"{text}. No on-demand nodes stand in: capacity.fallback.policy is None"
    if not pools_have(spec, CapacityType.ON_DEMAND):
        return f"{text}. No on-demand nodes stand in: capacity.pools has none"
    return f"{text}. No on-demand nodes stand in: the job has as many as capacity.onDemand.max allows"


def _stand_ins_sentence(situation: Situation, draft: Draft, since: datetime) -> str:
    """Until when on-demand nodes stand in, which do so since then."""
    again, text = spot_again(situation, draft), "On-demand nodes stand in for spot nodes"
    if stays_on_demand(situation):
        return f"{text}, as there is no time left for a change (capacity.finishBy)"
    if saves_nothing(situation):
        return f"{text}, which cost no less at present (pricePerHour)"
    usual = after(since, situation.spec.capacity.fallback.return_after_seconds)
    setting = "returnAfterSeconds" if again == usual else "afterSeconds, as none has come"
    refused = draft.status.refused_spot
    if again > usual and refused > 1:
        setting = f"returnAfterSeconds, and longer each time, as spot pods were refused {refused} times in a row"
    elif again > usual:
        setting = "returnAfterSeconds, and interruptions cost more than spot nodes save until then"
    return f"{text}, which are tried again at {time_of_day(again, situation.now)} (capacity.fallback.{setting})"


def _spot_nodes(situation: Situation, draft: Draft) -> str:
    """How many of the spot nodes that the job wants it has.

    Only nodes are counted: pods that this pass creates are not there yet, and those that it deletes still are.
    """
    return f"{_num_spot_nodes(situation, draft)} of {counted(demand_of(situation).spot, 'spot node')}"


def _num_spot_nodes(situation: Situation, draft: Draft) -> int:
    kept = _kept(situation, draft)
    return sum(pod.capacity_type is CapacityType.SPOT and pod.node is not None for pod in kept)


def lacks_only_spot(situation: Situation, pod: PodView) -> bool:
    """Whether `pod` may lack a node only because no spot node is free.

    Then an on-demand node would do. Otherwise no spot node suits it: the pod is too large, or the job's own pods or
    labels leave it none.
    """
    spec = situation.spec
    if pod.capacity_type is not CapacityType.SPOT or spec.pod_template.node_selector or not may_fall_back(spec):
        return False
    return lacks_labelled_node(pod)


def advice(situation: Situation, pod: PodView) -> str:
    """What the pod's pool asks for, and what to change so that `pod` gets a node.

    Nothing has to change if on-demand nodes stand in for spot nodes.
    """
    spec = situation.spec
    kept = situation.observed.kept_away.get(pod.uid, KeptAway())
    generation = situation.observed.job.status.generation
    same = generation is not None and generation.template_hash == situation.run_hash
    had_types = {m.capacity_type for m in generation.members} if generation is not None and same else set()
    placed = any(f.pod.node is not None and situation.is_of_template(f.pod) for f in situation.pods.values())
    asked = pool_sentence(pod, spec) if lacks_labelled_node(pod) else ""
    todo = ""
    had_type = pod.capacity_type in had_types
    if kept.num_down or had_type or not lacks_only_spot(situation, pod):
        todo = scheduler_advice(pod, spec, kept, had_type=had_type, had_node=placed or same)
    return ". ".join(part for part in (asked, todo, nodes_kept_away(pod, kept)) if part)


def leave_dry_pools(situation: Situation, draft: Draft) -> Draft:
    """Delete pods that have waited too long in their pool.

    Another one may have a node. Each is replaced in a pool in which no pod waits: in the same pass, or with the next
    try of a quota, in which it leaves room. If one waits in each pool, all of them stay.
    """
    if situation.observed.job.left_out or _pauses(situation, draft, 0):
        return draft
    refusal = situation.refusal
    waiting = [pod for pod in _kept(situation, draft) if _is_left_waiting(situation, draft, pod)]
    for capacity_type in CapacityType:
        if refusal is not None and capacity_type in refusal.capacity_types and not refusal.by_quota:
            continue
        leaving = [pod for pod in waiting if pod.capacity_type is capacity_type]
        deletions = [_leave_pool(pod) for pod in leaving]
        until = after(situation.now, situation.timing.pool_avoidance)
        without = avoid_dry_pools(situation, draft.act(*deletions), leaving, until=until)
        # On-demand pods beyond the floor would not be replaced.
        if len(missing(situation, without)) == len(missing(situation, draft)) + len(deletions):
            draft = without
    if waiting and draft.status.fallback_since is None:
        draft = draft.update(spot_pending_since=_spot_waits_since(situation, draft))
    return draft


def _leave_pool(pod: PodView) -> DeletePod:
    reason = f"pool {pod.pool} has had no node for it, and another pool is tried"
    return DeletePod(name=pod.name, uid=pod.uid, reason=reason)


def _is_left_waiting(situation: Situation, draft: Draft, pod: PodView) -> bool:
    """Whether `pod` has waited too long in its pool, and there is a pool in which none waits."""
    since = pod.unschedulable_since
    if since is None or lacks_more_than_nodes(pod):
        return False
    if seconds_between(since, situation.now) < patience(situation, pod):
        return False
    names = pools_by_preference(situation, draft, pod.capacity_type)
    return not _awaited_pools(situation, pod.capacity_type).issuperset(names)


def patience(situation: Situation, pod: PodView) -> float:
    """Seconds that `pod` waits for a node of its pool."""
    seconds = max(situation.spec.capacity.fallback.after_seconds, situation.timing.pool_patience)
    is_down = situation.observed.kept_away.get(pod.uid, KeptAway()).num_down
    return seconds * 2 if is_down else seconds


def create(situation: Situation, draft: Draft, pods: list[tuple[CapacityType, str | None]]) -> Draft:
    """Create pods of these types in these pools, under names that were never used before."""
    last, avoided = last_sequence(situation, draft), avoided_nodes(situation, draft)
    for sequence, (capacity_type, pool) in enumerate(pods, start=last + 1):
        name = f"{situation.observed.job.name}-{sequence}"
        action = CreatePod(name=name, sequence=sequence, capacity_type=capacity_type, pool=pool, avoided=avoided)
        draft = draft.act(action)
    return draft.update(last_sequence=last + len(pods))


def last_sequence(situation: Situation, draft: Draft) -> int:
    """The highest number that a pod of the job has had."""
    return max([draft.status.last_sequence, *(pod.sequence for pod in situation.observed.pods)])


def create_missing(situation: Situation, draft: Draft) -> Draft:
    """Create the missing pods, under names that were never used before."""
    types = _not_refused(situation, missing(situation, draft))
    if not types or _pauses(situation, draft, len(types)):
        return draft
    last = last_sequence(situation, draft)
    pods = [(kind, _pool(situation, draft, kind, last + number)) for number, kind in enumerate(types, start=1)]
    draft = create(situation, draft, pods)
    text = " and ".join(counted(types.count(kind), f"{kind.value} pod") for kind in CapacityType if kind in types)
    replaced = [situation.pods[uid] for uid in draft.leaving]
    if places(situation, draft.status, leaving=draft.leaving).missing_prewarmed:
        text += " ahead of time: the cloud recommends to leave a member's node"
    elif situation.tries_template and situation.pods:
        text += ", the first since the job was edited"
    elif any(not facts.current for facts in replaced):
        text += " in place of pods from before the edit"
    elif dry := {
        f.pod.pool for f in replaced if f.pod.pool is not None and _is_left_waiting(situation, draft, f.pod)
    }:
        text += f" in place of pods that found no node in {listed(sorted(dry))}"
    if _leaves_out_devices(situation.spec):
        text += ". They ask for no GPU: resources names none in limits, and replaces the default of one per process"
    return draft.record(EventReason.PODS_CREATED, f"Creating {text}")


def _leaves_out_devices(spec: TrainingJobSpec) -> bool:
    """Whether `resources` names no device, not even zero of one."""
    given = spec.resources
    return given is not None and not given.claims and not any("/" in name for name in given.limits)


def next_try(refusal: Refusal, timing: Timing) -> datetime:
    """When refused pods are tried again: after a pause that doubles with each try."""
    pause = growing_pause(refusal.num_tries, first=timing.refusal_pause, most=timing.refusal_max_pause)
    return after(refusal.tried_at, pause)


def refusal_of(situation: Situation, draft: Draft) -> Refusal | None:
    """Why pods that the job lacks can't be created; None if it lacks none of a type that is refused."""
    refusal = situation.refusal
    lacks = refusal is not None and not refusal.capacity_types.isdisjoint(missing(situation, draft))
    return refusal if lacks else None


def _not_refused(situation: Situation, types: list[CapacityType]) -> list[CapacityType]:
    """Which of the missing pods to create now.

    Of a type that is refused, it is one after each pause, to see whether it still is.
    """
    refusal = situation.refusal
    if refusal is None:
        return types
    is_due = situation.now >= next_try(refusal, situation.timing)
    retried = [each for each in CapacityType if is_due and each in types and each in refusal.capacity_types]
    return [*retried, *(each for each in types if each not in refusal.capacity_types)]


def missing(situation: Situation, draft: Draft) -> list[CapacityType]:
    """The types of the pods that the job lacks.

    After an edit of the template, one pod is created first, beside those of the old template. As long as Kubernetes
    accepts none, what runs continues.
    """
    if pause_of(situation) or rival_of(situation, draft) or waits_to_be_understood(situation, draft):
        return []
    if holds_off(situation, draft) or waits_for_profile(situation):
        return []
    needed = places(situation, draft.status, leaving=draft.leaving)
    num_spot = needed.missing_spot + needed.missing_prewarmed
    types = [CapacityType.ON_DEMAND] * needed.missing_on_demand + [CapacityType.SPOT] * num_spot
    if situation.observed.job.left_out:
        types = types[: max(0, situation.spec.nodes.max - len(needed.kept))]
    return _with_tries(situation, types) if situation.tries_template else types


def _with_tries(situation: Situation, types: list[CapacityType]) -> list[CapacityType]:
    """The same, with a pod that tries the template if none is missing.

    If one is refused, a pod of each type that alone is enough to train is tried as well. If the job's limits leave no
    place for a pod, none is tried.
    """
    wanted = demand_of(situation)
    places_of = {CapacityType.ON_DEMAND: wanted.on_demand, CapacityType.SPOT: wanted.spot}
    tries = types or [each for each, number in places_of.items() if number][:1]
    if situation.refusal is None:
        return tries
    enough = [each for each, number in places_of.items() if number >= situation.spec.nodes.min]
    return [*tries, *(each for each in enough if each not in tries)]


def _pool(situation: Situation, draft: Draft, capacity_type: CapacityType, sequence: int) -> str | None:
    """The pool of the next pod.

    Those in which a pod waits for a node have none, so that one without capacity doesn't block all pods.
    """
    names = pools_by_preference(situation, draft, capacity_type, sequence)
    if not names:
        return None
    awaited = _awaited_pools(situation, capacity_type)
    return next((name for name in names if name not in awaited), names[0])


def _awaited_pools(situation: Situation, capacity_type: CapacityType) -> frozenset[str | None]:
    """The pools for a node of which a pod waits, as they are now."""

    def find() -> frozenset[str | None]:
        pods = (f.pod for f in situation.pods.values() if f.pod.capacity_type is capacity_type and not f.finished)
        return frozenset(p.pool for p in pods if p.node is None and asks_for_current_nodes(p, situation.spec))

    return situation.once(("awaited pools", capacity_type), find)


def _pauses(situation: Situation, draft: Draft, num_missing: int) -> bool:
    """Whether to pause before pods are replaced.

    Pods that ended before they trained are replaced ever more slowly. If more are missing than ended in the last try,
    all are created at once: a node that breaks each pod takes one of them, and the others may train.
    """
    created = sorted(f.pod.created_at for f in start_failures(situation, draft))
    if not created:
        return False
    # Pods that were created together often end together, as while a server is down. They are one try.
    pause = situation.timing.start_failure_pause
    begins = [i for i, each in enumerate(pairwise(created), 1) if seconds_between(*each) > pause]
    if num_missing > len(created) - max(begins, default=0):
        return False
    return seconds_between(created[-1], situation.now) < pause * 2.0 ** (1 + len(begins))
