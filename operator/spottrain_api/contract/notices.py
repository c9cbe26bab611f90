"""What the watcher says: to the agents of its node, and on the node for the operator."""

from __future__ import annotations

from datetime import datetime
from enum import StrEnum

from .message import Message


class NoticeKind(StrEnum):
    """What is announced: the node goes (PREEMPT, MAINTENANCE), it may go (REBALANCE), the pod goes (EVICT)."""

    PREEMPT = "preempt"
    REBALANCE = "rebalance"
    MAINTENANCE = "maintenance"
    EVICT = "evict"


class Notice(Message):
    """An announcement that a node, or one pod on it, will be gone at a deadline.

    One type whatever the source. `id` is the same for repeated signals of the same event. A notice that the
    cloud takes back is repeated with `cancelled`.
    """

    id: str
    node: str
    kind: NoticeKind = NoticeKind.PREEMPT
    source: str  # "ec2", "gce", "azure", "taint:<key>", "condition:<reason>", "node-deleted", "sigterm"
    deadline: datetime
    observed_at: datetime
    cancellable: bool = False
    cancelled: bool = False


# Notices about one pod alone have an id that begins so, followed by the pod's uid. They are no reason for the
# node's other pods to drain, nor to taint the node.
POD_NOTICE_PREFIX = "pod/"


class NoticeList(Message):
    """Answer of the watcher's notice API. `revision` changes when the notices do; ask again with `?after=`."""

    revision: str
    notices: tuple[Notice, ...] = ()
