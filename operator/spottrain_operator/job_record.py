"""What the operator keeps of a job in memory."""

from __future__ import annotations

from dataclasses import dataclass, field

from spottrain_operator.core.model import HeldNode, Refusal
from spottrain_operator.kube.retry import Retry
from spottrain_operator.objects.costs import Spending
from spottrain_operator.objects.history import Course
from spottrain_operator.objects.isolation import IsolationState
from spottrain_operator.objects.pod_events import KnownTroubles
from spottrain_operator.objects.pod_groups import GroupState
from spottrain_operator.tracing import Request


@dataclass(slots=True, kw_only=True)
class JobRecord:
    """What the operator keeps of one job from its first pass until the job is gone.

    A new operator starts with an empty one. So does a job that is created anew under the same name.

    Attributes:
        uid: The job's uid.
        refusal: Why pods of the job are refused, and of which types. None: no pod is.
        held: The nodes that the job held in the newest pass.
        annotating: When to annotate its pods again, if that is refused.
        isolation: Whether its NetworkPolicy was created.
        group: Its PodGroup.
        troubles: What is known of why its pods don't start.
        course: The points of its history that are yet to be written.
        spending: What it cost, as far as that is yet to be recorded.
        requests: Requests for the ends of generations that are yet to be traced, by generation. The next one may be
            asked to end before its first step.
    """

    uid: str
    refusal: Refusal | None = None
    held: tuple[HeldNode, ...] = ()
    annotating: Retry = field(default_factory=Retry)
    isolation: IsolationState = field(default_factory=IsolationState)
    group: GroupState = field(default_factory=GroupState)
    troubles: KnownTroubles = field(default_factory=KnownTroubles)
    course: Course = field(default_factory=Course)
    spending: Spending = field(default_factory=Spending)
    requests: dict[int, Request] = field(default_factory=dict)
