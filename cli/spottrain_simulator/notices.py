"""What clouds and kubelets announce."""

from __future__ import annotations

from datetime import datetime, timedelta

from spottrain_agent.agent_state import SIGTERM_SOURCE
from spottrain_api.contract.notices import Notice, NoticeKind


def preemption(node: str, *, deadline: datetime, observed_at: datetime, cancelled: bool = False) -> Notice:
    """The cloud takes the node back at the deadline."""
    return Notice(
        id=f"ec2-{node}-{deadline:%H%M%S.%f}",
        node=node,
        source="ec2",
        deadline=deadline,
        observed_at=observed_at,
        cancelled=cancelled,
    )


def recommendation(node: str, now: datetime) -> Notice:
    """The cloud recommends to leave the node."""
    return Notice(
        id=f"rebalance-{node}",
        node=node,
        kind=NoticeKind.REBALANCE,
        source="ec2",
        deadline=now + timedelta(seconds=600),
        observed_at=now,
    )


def sigterm(node: str, *, deadline: datetime, now: datetime) -> Notice:
    """The kubelet ends the pod, and kills it at the deadline."""
    return Notice(
        id="sigterm",
        node=node,
        kind=NoticeKind.EVICT,
        source=SIGTERM_SOURCE,
        deadline=deadline,
        observed_at=now,
    )
