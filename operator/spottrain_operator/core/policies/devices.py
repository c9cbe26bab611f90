"""Nodes whose GPUs failed: the job starts no pods on them for a while."""

from __future__ import annotations

from spottrain_api.contract.reports import FailureReason
from spottrain_api.v1alpha1.status import AvoidedNode
from spottrain_operator.core.draft import Draft
from spottrain_operator.core.facts.members import members_of
from spottrain_operator.core.facts.situation import Situation
from spottrain_operator.core.timing import after

_MAX_AVOIDED = 20


def avoid_failed_devices(situation: Situation, draft: Draft) -> Draft:
    """Note the nodes of members that the running generation has lost to a failed device.

    A node that is replaced has another name, and one that is repaired is tried again after `device_avoidance`.
    """
    generation = draft.running
    if generation is None:
        return draft
    known = {each.name for each in _still_avoided(situation, draft)}
    for m in members_of(situation, generation):
        if not m.lost_device or m.member.node in known:
            continue
        node = AvoidedNode(
            name=m.member.node, until=after(situation.now, situation.timing.device_avoidance), message=m.message
        )
        kept = (*_still_avoided(situation, draft), node)[-_MAX_AVOIDED:]
        draft = draft.update(avoided_nodes=kept)
        text = f"{m.message} The pod is replaced, and the job avoids the node until {node.until:%Y-%m-%d %H:%M} UTC"
        draft = draft.record(FailureReason.DEVICE_FAILED, text, warning=True)
    return draft


def avoided_nodes(situation: Situation, draft: Draft) -> tuple[str, ...]:
    """Names of the nodes that a new pod must not land on."""
    return tuple(each.name for each in _still_avoided(situation, draft))


def _still_avoided(situation: Situation, draft: Draft) -> tuple[AvoidedNode, ...]:
    return tuple(each for each in draft.status.avoided_nodes if each.until > situation.now)
