"""Notices about a node, from its watcher.

The watcher gives them to the agents of the node and, on the Node object, to the operator.
"""

from __future__ import annotations

import hashlib
from enum import StrEnum

from pydantic import AwareDatetime

from spottrain_api.contract.message import Message, PeerMessage, Text


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


# Kinds of notices for which a member drains.
DRAINING_KINDS = frozenset({NoticeKind.PREEMPT, NoticeKind.MAINTENANCE, NoticeKind.EVICT})


class Notice(Message):
    """An announcement that a node, or one pod on it, will be gone at a deadline.

    All sources yield this type. Repeated signals of one event have the same `id`. If the cloud takes a notice back,
    it is repeated with `cancelled`.
    """

    id: str
    node: str
    kind: NoticeKind = NoticeKind.PREEMPT
    # "ec2", "gce", "azure", "taint:<key>", "label:<key>", "condition:<reason>", "node-deleted", "sigterm"
    source: str
    deadline: AwareDatetime
    observed_at: AwareDatetime
    cancelled: bool = False

    @property
    def makes_drain(self) -> bool:
        """Whether members drain for it: it is in force, and no mere hint."""
        return self.kind in DRAINING_KINDS and not self.cancelled


# The id of a notice about one pod alone: this prefix and the pod's uid. The node's other pods don't drain for it,
# and the node gets no taint.
POD_NOTICE_PREFIX = "pod/"


class NoticeList(PeerMessage):
    """Answer of the watcher's notice API. Ask again with `?after=`.

    - revision: changes with the rest.
    - notices: with a trouble, one that is missing is not taken back, only not heard.
    - trouble: why the watcher can't hear some of its sources at present, as a sentence; None while it hears all.
    - starting: whether these have only not given their first answer yet, within the time that their cloud allows.
    - hears_cloud: whether the metadata of the node's cloud is one of its sources. Otherwise it hears only Kubernetes.
    - proof: that the watcher of the node gives the notices: `watcher_mark(proof)` stands on the Node. Absent while
      there are no notices, so that nobody else knows it.
    """

    revision: str
    notices: tuple[Notice, ...] = ()
    trouble: str | None = None
    starting: bool = False
    hears_cloud: bool = True
    proof: str | None = None


def watcher_mark(proof: str) -> str:
    """What a watcher writes on its Node, so that agents know its proof."""
    return hashlib.sha256(proof.encode()).hexdigest()


class WatchState(StrEnum):
    """Whether an agent can hear the notices for its node.

    - watched: a watcher answers, and hears all of its sources.
    - starting: a watcher answers, and waits for the first answer of a source, within the time that the cloud allows.
    - blind: a watcher answers, but can't hear some of its sources.
    - missing: no watcher answers.
    """

    WATCHED = "watched"
    STARTING = "starting"
    BLIND = "blind"
    MISSING = "missing"


class NodeWatch(Message):
    """What an agent knows of the watcher of its node.

    - seconds: since the state began, by the agent's monotonic clock.
    - trouble: why the notices can't be heard, in the words of the watcher or of the connection to it.
    - hears_cloud: False if the watcher says that it hears only Kubernetes.
    """

    state: WatchState
    seconds: float = 0.0
    trouble: Text | None = None
    hears_cloud: bool = True
