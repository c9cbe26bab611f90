"""Notices, which the watcher gives to the agents of its node and, on the node, to the operator."""

from __future__ import annotations

from datetime import datetime
from enum import StrEnum

from spottrain_api.contract.message import Message


class NoticeKind(StrEnum):
    """What the notice announces.

    - preempt, maintenance: the node will be gone.
    - rebalance: the node may be gone. A hint, for which nobody drains.
    - evict: the pod will be gone.
    """

    PREEMPT = "preempt"
    REBALANCE = "rebalance"
    MAINTENANCE = "maintenance"
    EVICT = "evict"


class Notice(Message):
    """An announcement that a node, or one pod on it, will be gone at a deadline.

    All sources yield this type. Repeated signals of one event have the same `id`. If the cloud takes a notice back,
    it is repeated with `cancelled`.
    """

    id: str
    node: str
    kind: NoticeKind = NoticeKind.PREEMPT
    source: str  # "ec2", "gce", "azure", "taint:<key>", "condition:<reason>", "node-deleted", "sigterm"
    deadline: datetime
    observed_at: datetime
    cancellable: bool = False
    cancelled: bool = False


# The id of a notice about one pod alone: this prefix and the pod's uid. The node's other pods don't drain for it,
# and the node gets no taint.
POD_NOTICE_PREFIX = "pod/"


class NoticeList(Message):
    """Answer of the watcher's notice API. `revision` changes with the notices. Ask again with `?after=`."""

    revision: str
    notices: tuple[Notice, ...] = ()
