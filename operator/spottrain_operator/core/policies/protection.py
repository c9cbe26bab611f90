"""Members ask autoscalers to leave their nodes alone, until a notice comes. So does a new pod, for some minutes.

Karpenter consolidates nodes, and the cluster autoscaler removes those that look idle. To a job, each such move is a
preemption that no cloud has asked for. With a notice, the node has to go, and the pod mustn't hold up its drain.
"""

from __future__ import annotations

from spottrain_operator.core.draft import Draft
from spottrain_operator.core.facts.situation import PodFacts, Situation
from spottrain_operator.core.model import PROTECTION, STARTING, AnnotatePod


def protect_members(situation: Situation, draft: Draft) -> Draft:
    """Annotate the pods of the newest generation's members, and no others.

    Between two generations they stay as they are, as most members are in both. Pods that have not been members keep
    what they were created with. Annotations of the podTemplate, and other values, are somebody's decision.
    """
    ours = PROTECTION.keys() - situation.spec.pod_template.annotations.keys()
    generation = draft.status.generation
    members = {member.pod_uid for member in generation.members} if generation is not None else set()
    leaving = draft.leaving
    for uid, facts in situation.pods.items():
        if uid in leaving or facts.pod.deleting or facts.finished:
            continue
        changes = _changes(facts, is_member=uid in members)
        changes = {name: changes[name] for name in sorted(ours & changes.keys())}
        if changes:
            draft = draft.act(AnnotatePod(name=facts.pod.name, uid=uid, annotations=changes))
    return draft


def _changes(facts: PodFacts, *, is_member: bool) -> dict[str, str | None]:
    found, goes = facts.pod.protection, facts.coming_loss is not None
    if is_member and not goes:
        return {name: value for name, value in PROTECTION.items() if found.get(name) in (None, STARTING.get(name))}
    lifted = (PROTECTION, STARTING) if goes else (PROTECTION,)
    return {name: None for each in lifted for name, value in each.items() if found.get(name) == value}
