"""Keeps a NodePool of Karpenter for each pool that names a node class, as long as the job may need nodes.

A NodePool takes its nodes along. So one that the job wants no longer stays until none of its pods is on them.
"""

from __future__ import annotations

from spottrain_api.contract.conditions import ConditionReason, ConditionType
from spottrain_api.contract.nodes import KARPENTER_NODE_POOL
from spottrain_operator.core.draft import Draft
from spottrain_operator.core.facts.situation import Situation
from spottrain_operator.core.node_pools import DeleteNodePool, NodePoolsView, WriteNodePool
from spottrain_operator.core.policies.profiles import waits_for_profile
from spottrain_operator.core.trouble import Trouble


def make_node_pools(situation: Situation, draft: Draft) -> Draft:
    """NodePoolsReady: whether Karpenter can make nodes for the pools that have a NodePool of their own."""
    pools = situation.observed.node_pools
    if pools is not None and not _is_unsure(situation):
        draft = _keep_wanted(situation, draft, pools)
    trouble = _trouble(pools) if pools is not None else None
    if trouble is not None:
        return draft.condition(ConditionType.NODE_POOLS_READY, False, trouble.reason, trouble.message, situation.now)
    return _say_it_is_over(situation, draft, True, ConditionReason.NODE_POOLS_MADE)


def finish(situation: Situation, draft: Draft) -> Draft:
    """Delete all NodePools once the job's pods have ended."""
    pools = situation.observed.node_pools
    if pools is not None and not _in_use(situation):
        draft = draft.act(*(DeleteNodePool(name=each.name, uid=each.uid) for each in pools.found))
    return _say_it_is_over(situation, draft, False, ConditionReason.FINISHED)


def _is_unsure(situation: Situation) -> bool:
    """Whether the spec isn't yet, or isn't wholly, what the job's user asks for."""
    return bool(situation.observed.job.left_out) or waits_for_profile(situation)


def _keep_wanted(situation: Situation, draft: Draft, pools: NodePoolsView) -> Draft:
    there = {each.name: each.content for each in pools.found}
    for name, content in sorted(pools.wanted.items()):
        if there.get(name) != content:
            draft = draft.act(WriteNodePool(name=name))
    unwanted = [each for each in pools.found if each.name not in pools.wanted]
    used = _in_use(situation) if unwanted else set()
    return draft.act(*(DeleteNodePool(name=each.name, uid=each.uid) for each in unwanted if each.name not in used))


def _in_use(situation: Situation) -> set[str]:
    """The NodePools that have made the nodes of the job's pods. Of a pod without a node, none is known."""
    nodes = (situation.observed.nodes.get(f.pod.node or "") for f in situation.pods.values() if not f.ended)
    return {node.labels.get(KARPENTER_NODE_POOL, "") if node is not None else "" for node in nodes}


def _trouble(pools: NodePoolsView) -> Trouble | None:
    if pools.trouble is not None:
        return pools.trouble
    for each in pools.found:
        if each.not_ready and each.name in pools.wanted:
            message = f"Karpenter makes no nodes of NodePool {each.name}: {each.not_ready}"
            return Trouble(reason=ConditionReason.NODE_POOL_NOT_READY, message=message)
    return None


def _say_it_is_over(situation: Situation, draft: Draft, holds: bool, reason: ConditionReason) -> Draft:
    """Only a job that had trouble with its NodePools has the condition."""
    if draft.status.condition(ConditionType.NODE_POOLS_READY) is None:
        return draft
    message = (
        "Karpenter can make nodes for the job's pools" if holds else "The job has finished, and needs no NodePools"
    )
    return draft.condition(ConditionType.NODE_POOLS_READY, holds, reason, message, situation.now)
