"""The core's vocabulary: observations of one job, and decisions about it.

The reconciler makes an `Observed` from what the API server shows and the agents' newest reports. It carries out
the `Plan` in this order: status, assignments, actions, events.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import datetime, timedelta

from spottrain_api.contract.assignments import AgentReport, CapacityType
from spottrain_api.contract.conditions import WaitingReason
from spottrain_api.contract.names import ANNOTATION_DO_NOT_DISRUPT, ANNOTATION_SAFE_TO_EVICT, TRAINER_CONTAINER
from spottrain_api.contract.nodes import DEFAULT_GRACE_SECONDS
from spottrain_api.contract.notices import Notice
from spottrain_api.v1alpha1.profile import ProfileSpec
from spottrain_api.v1alpha1.spec import TrainingJobSpec
from spottrain_api.v1alpha1.status import TrainingJobStatus
from spottrain_operator.core.node_pools import NodePoolAction, NodePoolsView
from spottrain_operator.core.timing import DEFAULT_TIMING, Timing
from spottrain_operator.core.workloads import QueueView, WorkloadAction

# Reasons of containers that have ended without a start. They have no log.
FAILED_STARTS = frozenset({"StartError", "ContainerCannotRun"})
# A kubelet's reasons why a container can't start, and won't if one waits.
CANNOT_START = frozenset(WaitingReason)
# Annotations by which autoscalers leave a pod's node alone.
PROTECTION: Mapping[str, str] = {ANNOTATION_DO_NOT_DISRUPT: "true", ANNOTATION_SAFE_TO_EVICT: "false"}
# What Karpenter reads on a new pod: its node stays for so long from the pod's start, and then it may go, also if no
# operator is there. Karpenter before 1.12 ignores a duration.
STARTING: Mapping[str, str] = {ANNOTATION_DO_NOT_DISRUPT: "10m"}
# Number of membership changes that the status keeps.
MAX_TRANSITIONS = 50


@dataclass(frozen=True, slots=True, kw_only=True)
class PodView:
    """What the core knows of a trainer pod. Times are UTC."""

    name: str
    uid: str
    sequence: int
    capacity_type: CapacityType
    template_hash: str
    created_at: datetime
    phase: str = "Pending"  # "Pending", "Running", "Succeeded", "Failed"; once the trainer has ended, as it did
    lingers: bool = False  # the trainer has ended, and another container still runs
    ready: bool = False
    ready_since: datetime | None = None  # the Ready condition's last transition, while it is ready
    node: str | None = None
    scheduled_at: datetime | None = None  # the PodScheduled condition's last transition, once it has a node
    ip: str | None = None
    deleting: bool = False
    deletion_deadline: datetime | None = None  # metadata.deletionTimestamp, which includes the grace period
    container: str = TRAINER_CONTAINER  # the one that waits or ended: the trainer, or one beside it that it waits for
    initializing_since: datetime | None = None  # `container` is an init container, and runs since then
    # Why the container doesn't run: state.waiting, state.terminated with reason StartError, a volume that can't be
    # mounted ("FailedMount"), no suitable node ("Unschedulable"), or a gate before the scheduler ("SchedulingGated").
    waiting_reason: str | None = None
    waiting_message: str | None = None
    # When this operator first saw that its container can't start for the reason.
    waiting_since: datetime | None = None
    exit_code: int | None = None
    # terminated.reason of its state, or of its last run if it waits to be restarted, such as "OOMKilled", "Error".
    exit_reason: str | None = None
    exit_message: str | None = None  # last line of the trainer's termination message, which may be that of its log
    # status.reason and status.message of a pod that its kubelet has rejected ("UnexpectedAdmissionError") or ended
    # ("Evicted").
    kubelet_reason: str | None = None
    kubelet_message: str | None = None
    unschedulable_since: datetime | None = None
    disruption: str | None = None  # reason of the DisruptionTarget condition
    disrupted_at: datetime | None = None  # the DisruptionTarget condition's last transition, while it is true
    grace_seconds: float = DEFAULT_GRACE_SECONDS  # spec.terminationGracePeriodSeconds
    container_started: bool = False  # the container runs, or has run
    pool: str | None = None
    pool_hash: str | None = None  # None: it has no pool
    group: str = ""  # the PodGroup that it is in
    protection: Mapping[str, str] = field(default_factory=dict)  # annotations that ask autoscalers to leave the node

    @property
    def exceeded_limits(self) -> bool:
        """Whether its kubelet evicted it for its own use of disk.

        If a node lacks disk or memory, its kubelet also sets DisruptionTarget on those that it evicts.
        """
        return self.kubelet_reason == "Evicted" and self.disruption is None

    @property
    def placed_at(self) -> datetime:
        """When it got its node. Until that is known, it is the time of its creation."""
        return self.scheduled_at or self.created_at

    @property
    def stuck_since(self) -> datetime:
        """When it was first seen that its container can't start.

        Until that is known, it is when it got its node.
        """
        return self.waiting_since or self.placed_at


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeView:
    """What the core knows of a node with a pod of the job.

    A node that is gone has no view.
    """

    name: str
    ready: bool = True
    unready_since: datetime | None = None  # the Ready condition's last transition, while it is not True
    deleting: bool = False
    taints: tuple[str, ...] = ()  # keys
    notice: Notice | None = None  # the watcher's annotation
    watcher: str = ""  # its mark
    labels: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class KeptAway:
    """How many nodes have the labels that a pod asks for, and are kept from it.

    Attributes:
        num_down: Nodes that go, or are not up yet.
        taints: Keys of the taints on those that are tainted.
    """

    num_cordoned: int = 0
    num_tainted: int = 0
    num_down: int = 0
    taints: frozenset[str] = frozenset()


@dataclass(frozen=True, slots=True, kw_only=True)
class JobView:
    """A TrainingJob as it was read: what its user asks for, and what was decided so far.

    Attributes:
        orphans_pods: Whether its deletion is to leave the pods, as with `kubectl delete --cascade=orphan`.
        not_understood: Fields of the spec that a newer version may have written. `spec` doesn't have them.
        too_large: Fields that hold too much.
        beyond_profile: Sentences about what its profile's limits have cut back.
        queue: LocalQueue of Kueue that it waits in. Empty: none.
        queue_priority: WorkloadPriorityClass. Empty: that of its pods, or none.
    """

    namespace: str
    name: str
    uid: str
    spec: TrainingJobSpec
    metadata_generation: int
    created_at: datetime
    deleting: bool = False
    orphans_pods: bool = False
    status: TrainingJobStatus = field(default_factory=TrainingJobStatus)
    not_understood: tuple[str, ...] = ()
    too_large: tuple[str, ...] = ()
    beyond_profile: tuple[str, ...] = ()
    queue: str = ""
    queue_priority: str = ""

    @property
    def left_out(self) -> tuple[str, ...]:
        """The fields that the operator can't apply. Edits then disturb nothing that runs."""
        return self.not_understood + self.too_large

    def understands(self, field: str) -> bool:
        """Whether `field`, as in runPolicy.failureBudget, is as its user wrote it.

        Otherwise `spec` has the default in its place, which may be a stricter limit.
        """
        return not any(f"spec.{field}.".startswith(f"{each}.") for each in self.not_understood)


@dataclass(frozen=True, slots=True, kw_only=True)
class ReportView:
    """The newest report of an agent, and when the agent was heard.

    Times, also those of the report's progress, are by the operator's clock, because agents' clocks may be off.

    Attributes:
        clock_offset: What was added to the agent's times.
        latency: How many seconds longer than the fastest of its agent's reports of late this one was on its way, as
            when the operator is busy.
        heard_at: When the agent was heard without a report, as by its poll.
        comes_by: Time until which one that has lost its relay may be on its way.
    """

    report: AgentReport
    received_at: datetime
    clock_offset: timedelta = timedelta()
    latency: float = 0.0
    heard_at: datetime | None = None
    comes_by: datetime | None = None

    @property
    def made_at(self) -> datetime:
        """When the agent made the report."""
        return self.received_at - timedelta(seconds=self.latency)

    @property
    def last_contact(self) -> datetime:
        """When the agent was last known to be there.

        Up to then, it has reported all that it reports at once.
        """
        return self.received_at if self.heard_at is None else max(self.received_at, self.heard_at)


@dataclass(frozen=True, slots=True, kw_only=True)
class Refusal:
    """The pods that a spec asks for can't be created.

    `message` is the sentence of whoever refuses them. An edit of the spec makes all of it void, whatever it changes:
    pools and bounds decide on pods, too.

    Attributes:
        metadata_generation: Of the spec.
        capacity_types: Of the refused pods. Pods of other types are accepted, or were not tried yet.
        lasting: It doesn't pass when other jobs end.
        by_quota: It may pass when pods of this job are deleted.
    """

    metadata_generation: int
    capacity_types: frozenset[CapacityType] = frozenset(CapacityType)
    message: str
    since: datetime
    lasting: bool
    by_quota: bool = False
    tried_at: datetime
    num_tries: int = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Rival:
    """An unfinished job that comes first at this job's checkpoint folder."""

    namespace: str
    name: str


@dataclass(frozen=True, slots=True, kw_only=True)
class ProfileView:
    """The profile that a job is yet to take.

    Attributes:
        generation: Its metadata.generation.
        spec: None: there is no such profile.
    """

    name: str
    generation: int = 0
    spec: ProfileSpec | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Holder:
    """Another job of the namespace that holds nodes."""

    name: str
    num_nodes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class HeldNode:
    """A node that the job pays for, with its pod.

    Attributes:
        node: None: there is no node object.
    """

    pod: PodView
    node: NodeView | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Observed:
    """One job with everything that a decision about it needs.

    Attributes:
        reports: By pod uid, of the agents that were heard since `listening_since`.
        refused_reports: Why the newest report of a pod was refused, by pod uid. Its `reports` are older.
        profile: None: the job takes none, or has taken it.
        queue: None: the job is in no queue, and has left nothing in one.
        node_pools: None: none of its pools is to have a NodePool of its own, and none is left.
        num_younger_waiting: Number of jobs that wait for nodes, too, and are younger.
        holders: Other jobs of the namespace that hold nodes, those with most nodes first.
        held_before: The nodes that the job held in the pass before. A new operator knows of none.
        kept_away: Nodes that are kept from the pods without a node, by pod uid.
        template_hash: Of the pod template that the current spec gives.
        timing: The durations that decisions depend on.
        listening_since: Time from which on this operator listens; the present until it does. An agent's silence
            before it means nothing.
    """

    job: JobView
    pods: tuple[PodView, ...] = ()
    nodes: Mapping[str, NodeView] = field(default_factory=dict)
    reports: Mapping[str, ReportView] = field(default_factory=dict)
    refused_reports: Mapping[str, str] = field(default_factory=dict)
    kept_away: Mapping[str, KeptAway] = field(default_factory=dict)
    template_hash: str
    listening_since: datetime
    timing: Timing = DEFAULT_TIMING
    refusal: Refusal | None = None
    rival: Rival | None = None
    profile: ProfileView | None = None
    queue: QueueView | None = None
    node_pools: NodePoolsView | None = None
    num_younger_waiting: int = 0
    holders: tuple[Holder, ...] = ()
    held_before: tuple[HeldNode, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class CreatePod:
    """Create the pod `name` from the current template.

    If it exists already, there is nothing to do.
    """

    name: str
    sequence: int
    capacity_type: CapacityType
    pool: str | None = None  # name of the pool in spec.capacity.pools; None: any node of that capacity type
    avoided: tuple[str, ...] = ()  # names of nodes that it must not land on
    reason: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class DeletePod:
    """Delete exactly this pod, with its uid as precondition.

    Attributes:
        grace_seconds: None: the pod's own. 0: at once.
    """

    name: str
    uid: str
    reason: str
    grace_seconds: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class AnnotatePod:
    """Set or remove (None) annotations of exactly this pod.

    If it is gone, there is nothing to do.
    """

    name: str
    uid: str
    annotations: Mapping[str, str | None]


@dataclass(frozen=True, slots=True, kw_only=True)
class DeleteJob:
    """Delete the finished job after its time to live."""

    uid: str
    reason: str


JobAction = CreatePod | DeletePod | AnnotatePod | DeleteJob
Action = JobAction | WorkloadAction | NodePoolAction


@dataclass(frozen=True, slots=True, kw_only=True)
class Event:
    """A decision as its user sees it in `kubectl describe`."""

    type: str  # "Normal" or "Warning"
    reason: str
    message: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """What to do now, and when to decide again.

    Attributes:
        requeue_after: Seconds after which to decide again if nothing happens before. None means never.
        held: The nodes that the job holds.
    """

    status: TrainingJobStatus
    actions: tuple[Action, ...] = ()
    events: tuple[Event, ...] = ()
    requeue_after: float | None = None
    held: tuple[HeldNode, ...] = ()
