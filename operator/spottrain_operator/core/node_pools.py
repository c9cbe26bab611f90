"""The core's vocabulary for Karpenter: what is known of a job's NodePools, and what to do with them.

A pool with a `nodeClass` has a NodePool of its own, from which Karpenter makes nodes for the job's pods.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from spottrain_operator.core.trouble import Trouble


@dataclass(frozen=True, slots=True, kw_only=True)
class NodePoolView:
    """What the core knows of a NodePool that the operator has made for the job.

    Attributes:
        content: Hash of what it was to be when it was last written.
        not_ready: Why Karpenter makes no nodes of it, in Karpenter's words. Empty: it does, or has not said so.
    """

    name: str
    uid: str
    content: str
    not_ready: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class NodePoolsView:
    """The NodePools of a job.

    Attributes:
        wanted: Those of its pools, as the hash of what each is to be, by name.
        found: Those that there are.
        trouble: Why they can't be made.
    """

    wanted: Mapping[str, str] = field(default_factory=dict)
    found: tuple[NodePoolView, ...] = ()
    trouble: Trouble | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class WriteNodePool:
    """Make this NodePool of the job, or make it anew what it is to be."""

    name: str


@dataclass(frozen=True, slots=True, kw_only=True)
class DeleteNodePool:
    """Delete exactly this NodePool, and its nodes with it."""

    name: str
    uid: str


NodePoolAction = WriteNodePool | DeleteNodePool
