"""What the operator reports: the status of a TrainingJob."""

from __future__ import annotations

from datetime import datetime
from enum import StrEnum
from typing import Annotated

from pydantic import Field

from spottrain_api.contract.assignments import Member
from spottrain_api.contract.conditions import ConditionType
from spottrain_api.contract.replicas import ReplicatedStep
from spottrain_api.contract.reports import CommitRef, StrategyChoice
from spottrain_api.settings.resource import StatusResource
from spottrain_api.v1alpha1.profile import ProfileSpec
from spottrain_api.v1alpha1.spending import CostStatus, TimeStatus


class Phase(StrEnum):
    """Stage that the job is in.

    - Pending: it waits for nodes, before its first generation or after a suspension.
    - Starting: a generation has started and makes its first step soon.
    - Running: a generation makes steps.
    - Draining: the generation commits and ends, to make way for the next.
    - Recovering: a generation has broken or ended, and the next has not started yet.
    - Suspended: runPolicy.suspend is set or the budget is spent, and no generation runs.
    - Succeeded: the program has ended on all ranks.
    - Failed: the job has given up; `message` says why.
    """

    PENDING = "Pending"
    STARTING = "Starting"
    RUNNING = "Running"
    DRAINING = "Draining"
    RECOVERING = "Recovering"
    SUSPENDED = "Suspended"
    SUCCEEDED = "Succeeded"
    FAILED = "Failed"


FINISHED_PHASES = frozenset({Phase.SUCCEEDED, Phase.FAILED})
# As ProgressStatus.data_wait_ratio. If ranks wait longer for data, they lose what more workers would save.
LONG_DATA_WAIT = 0.1


class Condition(StatusResource):
    """One aspect of the job's state, as metav1.Condition."""

    type: Annotated[
        str,
        Field(
            description=f"What it is about: {', '.join(ConditionType)}.",
        ),
    ]
    status: Annotated[str, Field(description="Whether it holds: True, False or Unknown.")]
    reason: Annotated[str, Field(description="Why, in one word for programs.")]
    message: Annotated[str, Field(description="Why, in a sentence for people.")]
    last_transition_time: Annotated[datetime, Field(description="Time at which `status` last changed.")]


class GenerationState(StrEnum):
    """State of the generation.

    - Active: its members are to train.
    - Draining: its members are to commit and stop.
    - Stopping: its members are to stop at once, without a commit.
    - Ended: it is over.
    """

    ACTIVE = "Active"
    DRAINING = "Draining"
    STOPPING = "Stopping"
    ENDED = "Ended"


class GenerationStatus(StatusResource):
    """The newest generation: one fixed set of members that train together."""

    number: Annotated[int, Field(description="Number of the generation. It grows with each new one.")]
    state: GenerationState
    rendezvous_id: Annotated[
        str, Field(alias="rendezvousID", description="Id with which the members find each other in torchrun.")
    ]
    rendezvous_endpoint: Annotated[
        str, Field(description="Address and port of torchrun's store, on the member with node rank 0.")
    ]
    world_size: Annotated[int, Field(description="Number of ranks.")]
    members: Annotated[tuple[Member, ...], Field(description="Pods that train together, one per node.")] = ()
    resume: Annotated[
        CommitRef | None,
        Field(description="Newest commit that the operator knew when the generation started, from which it resumes."),
    ] = None
    replicated_step: Annotated[
        ReplicatedStep | None,
        Field(
            description="Replicated step in the members' memory from which the generation resumes instead, as it is "
            "newer than the commit. See checkpoint.peerReplicas."
        ),
    ] = None
    template_hash: Annotated[
        str,
        Field(description="Hash of the settings that the members run with. If the job's settings differ, it drains."),
    ] = ""
    started_at: Annotated[datetime, Field(description="Time at which the operator started the generation.")]
    first_step_at: Annotated[
        datetime | None, Field(description="Time at which the generation completed its first step.")
    ] = None
    reason: Annotated[
        str | None,
        Field(
            description="Why it drains, stops or has ended: Grow, ScaleDown, Edited, Suspended, BudgetSpent, "
            "SpotIsDear, QuotaTaken, DeadlineExceeded, Failure, Hang, Preempted, NodeLost, StatusRestored, "
            "EarlierJob or Succeeded, or the reason of the condition Failed."
        ),
    ] = None
    message: Annotated[
        str | None,
        Field(description="What failed, in a sentence, if the reason is Failure."),
    ] = None
    requested_at: Annotated[
        datetime | None, Field(description="Time at which the drain or the stop was asked for.")
    ] = None
    deadline: Annotated[datetime | None, Field(description="Time by which the drain has to end.")] = None
    ended_at: Annotated[datetime | None, Field(description="Time at which the generation had ended.")] = None


class ProgressStatus(StatusResource):
    """How far the training is, as the ranks reported it last."""

    step: Annotated[int, Field(description="Optimizer steps that are completed, counted from the job's start.")] = 0
    total_steps: Annotated[int | None, Field(description="Optimizer steps after which the training ends.")] = None
    display: Annotated[str, Field(description="Completed and total steps, as `kubectl get` shows them.")] = ""
    loss: Annotated[
        float | None,
        Field(description="Mean loss over the global batch of the newest step, or of one or two steps before."),
    ] = None
    tokens_per_second: Annotated[float | None, Field(description="Tokens per second, all ranks together.")] = None
    samples_per_second: Annotated[float | None, Field(description="Samples per second, all ranks together.")] = None
    epoch: Annotated[
        float | None,
        Field(description="Epochs of the data that are used, with the share of the one under way, such as 1.25."),
    ] = None
    data_wait_ratio: Annotated[
        float | None, Field(description="Share of a step's time that the slowest rank waits for data, from 0 to 1.")
    ] = None
    eta_seconds: Annotated[
        float | None, Field(description="Seconds until the last step, at the current time per step.")
    ] = None
    last_step_at: Annotated[datetime | None, Field(description="Time of the newest step.")] = None
    waited_seconds: Annotated[
        float,
        Field(description="Seconds that the slowest rank has waited for data since this generation's first step."),
    ] = 0.0
    stalled_seconds: Annotated[
        float,
        Field(description="Seconds that saves have kept the ranks from training since this generation's first step."),
    ] = 0.0
    checkpoint_interval: Annotated[
        str | None, Field(description="How often the ranks commit, and why, in a sentence.")
    ] = None
    checkpoint_interval_seconds: Annotated[
        float | None, Field(description="Planned seconds from one commit to the next.")
    ] = None
    skipped_steps: Annotated[
        int,
        Field(description="Steps that left no trace in the model because `stability` skipped them or undid them."),
    ] = 0
    rollbacks: Annotated[
        int, Field(description="Number of times that `stability` rolled the run back to a commit.")
    ] = 0
    message: Annotated[
        str | None, Field(description="What last differed from the plan on the ranks, in a sentence.")
    ] = None


class Transition(StatusResource):
    """One change of membership, from one generation to the next, and its cost."""

    generation: Annotated[int, Field(description="Number of the generation that ended.")]
    reason: Annotated[
        str,
        Field(
            description="Why it ended: Grow, ScaleDown, Edited, Suspended, BudgetSpent, QuotaTaken, "
            "DeadlineExceeded, Failure, Hang, Preempted, NodeLost, StatusRestored or EarlierJob."
        ),
    ]
    message: Annotated[str, Field(description="Why it ended, in a sentence.")] = ""
    with_notice: Annotated[
        bool, Field(description="Whether a node was taken with notice, so that the generation could commit.")
    ] = False
    from_replicas: Annotated[
        bool,
        Field(
            description="Whether the next generation resumed from replicas in the members' memory, not from a commit."
        ),
    ] = False
    at: Annotated[datetime, Field(description="Time at which the generation had ended.")]
    last_step: Annotated[
        int, Field(description="Newest step that it completed, as far as the operator had heard.")
    ] = 0
    last_step_at: Annotated[
        datetime | None,
        Field(description="Time of that step; without a step of its own, the time at which the generation ended."),
    ] = None
    resume_step: Annotated[
        int | None, Field(description="Step from which the next generation resumed. Set after its first step.")
    ] = None
    steps_redone: Annotated[
        int | None,
        Field(
            description="Steps that were lost and redone, as far as the operator had heard of them. Set after the "
            "next generation's first step."
        ),
    ] = None
    seconds_without_step: Annotated[
        float | None,
        Field(
            description="Seconds from `lastStepAt` to the first step after. Set after that step. If all members were "
            "lost at once, they contain the steps since their last report."
        ),
    ] = None
    world_size_before: Annotated[int, Field(description="Number of ranks of the generation that ended.")] = 0
    world_size_after: Annotated[
        int | None, Field(description="Number of ranks of the next generation. Set when it starts.")
    ] = None


class Counts(StatusResource):
    """Ranks and members of the running generation, and pods for the next one."""

    world_size: Annotated[int, Field(description="Number of ranks that train together. 0 if none train.")] = 0
    on_demand: Annotated[int, Field(description="Number of members on on-demand nodes.")] = 0
    spot: Annotated[int, Field(description="Number of members on spot nodes.")] = 0
    waiting: Annotated[int, Field(description="Number of pods that are ready and wait for the next generation.")] = 0


class AvoidedNode(StatusResource):
    """A node on which the job starts no pods for a while."""

    name: Annotated[str, Field(description="Name of the node.")]
    until: Annotated[datetime, Field(description="Time from which on it may be used again.")]
    message: Annotated[str, Field(description="Why it is avoided.")] = ""


class AvoidedPool(StatusResource):
    """A pool that comes last for a while."""

    name: Annotated[str, Field(description="Name of the pool.")]
    capacity_type: Annotated[str, Field(description="Capacity type of its pods.")]
    until: Annotated[datetime, Field(description="Time from which on it comes as its weight and price say.")]
    message: Annotated[str, Field(description="Why it is avoided.")] = ""


class HoldOff(StatusResource):
    """Until when a job that gave its nodes back asks for none."""

    until: Annotated[datetime, Field(description="Time at which the job asks for nodes again.")]
    times: Annotated[
        int,
        Field(description="Number of times that it gave nodes back since it last trained. The pause grows with it."),
    ] = 1


class TakenProfile(StatusResource):
    """What a job took from its profile. Later edits of the profile, and its deletion, don't change it."""

    name: Annotated[str, Field(description="Name of the TrainingProfile.")]
    generation: Annotated[int, Field(description="metadata.generation of the profile then.")] = 0
    spec: Annotated[ProfileSpec, Field(description="The profile as it was then.")] = ProfileSpec()


class TrainingJobStatus(StatusResource):
    """What the operator reports: phase, progress, members and cost.

    The operator alone writes it, and continues from it after a restart.
    """

    phase: Phase = Phase.PENDING
    message: Annotated[str, Field(description="What the job does or waits for, in a sentence.")] = ""
    observed_generation: Annotated[
        int, Field(description="metadata.generation of the spec that this status answers.")
    ] = 0
    conditions: Annotated[
        tuple[Condition, ...], Field(description="Aspects of the job's state, one of each type.")
    ] = ()
    profile: Annotated[
        TakenProfile | None, Field(description="The profile that the job has taken, as it was then.")
    ] = None
    generation: Annotated[
        GenerationStatus | None,
        Field(description="The newest generation: one fixed set of members that train together."),
    ] = None
    progress: ProgressStatus = ProgressStatus()
    strategy: Annotated[
        StrategyChoice | None, Field(description="What strategy auto chose at the first start, and why.")
    ] = None
    commit: Annotated[CommitRef | None, Field(description="The newest commit that any member reported.")] = None
    members: Counts = Counts()
    transitions: Annotated[
        tuple[Transition, ...], Field(description="The newest changes of membership, at most 50, oldest first.")
    ] = ()
    preemptions: Annotated[int, Field(description="Generations that ended because a node was taken or lost.")] = 0
    preemptions_without_notice: Annotated[int, Field(description="Those of them whose node went without notice.")] = 0
    steps_redone: Annotated[
        int,
        Field(description="Steps that were lost and redone, in all, as far as the operator had heard of them."),
    ] = 0
    failures: Annotated[int, Field(description="Failures that count against runPolicy.failureBudget.")] = 0
    generations_without_progress: Annotated[
        int, Field(description="Generations in a row that failed without a step. After three the job fails.")
    ] = 0
    goodput: Annotated[
        float | None,
        Field(
            description="Share of the time since startTime that went into lasting steps, from 0 to 1. Steps that a "
            "rollback undid count as lasting, since their numbers stay. The time of a script that doesn't use the "
            "library is left out. Absent if only such a script ran. `time` says where the rest went."
        ),
    ] = None
    goodput_display: Annotated[str | None, Field(description="Goodput in percent, as `kubectl get` shows it.")] = None
    time: Annotated[TimeStatus | None, Field(description="What the time since startTime went into, in seconds.")] = (
        None
    )
    cost: Annotated[
        CostStatus | None,
        Field(description="Money that the job's nodes have cost so far. Absent if no price is known."),
    ] = None
    slack_seconds: Annotated[
        float | None,
        Field(
            description="Seconds that the job can lose and still finish by capacity.finishBy, on as many on-demand "
            "nodes as it may have. Absent without a deadline, and before the first steps."
        ),
    ] = None
    # Bookkeeping that must survive a restart of the operator.
    last_sequence: Annotated[int, Field(description="Highest number that a pod of this job has had in its name.")] = 0
    avoided_nodes: Annotated[
        tuple[AvoidedNode, ...],
        Field(description="Nodes whose GPUs failed, on which the job starts no pods for a while, at most 20."),
    ] = ()
    avoided_pools: Annotated[
        tuple[AvoidedPool, ...],
        Field(
            description="Pools that come last for a while: the cloud took a node of them, or they had none for a pod."
        ),
    ] = ()
    hold_off: Annotated[
        HoldOff | None,
        Field(
            description="Set once the job has given its nodes back, as too few came to reach nodes.min. Absent after "
            "its next generation has started."
        ),
    ] = None
    spot_pending_since: Annotated[
        datetime | None,
        Field(description="Time since which a spot pod waits for a node. Absent while none waits."),
    ] = None
    fallback_since: Annotated[
        datetime | None,
        Field(description="Time since which on-demand nodes stand in for spot nodes. Absent while they don't."),
    ] = None
    refused_spot: Annotated[
        int,
        Field(
            description="Fallbacks in a row because spot pods were refused, as by a quota. Each one after the first "
            "doubles the time until spot nodes are tried again, up to eight times returnAfterSeconds."
        ),
    ] = 0
    accounted_at: Annotated[
        datetime | None, Field(description="Time up to which cost, goodput and progress are recorded.")
    ] = None
    start_time: Annotated[datetime | None, Field(description="Time at which the first generation started.")] = None
    completion_time: Annotated[datetime | None, Field(description="Time at which the job succeeded or failed.")] = (
        None
    )

    @property
    def running(self) -> GenerationStatus | None:
        """The newest generation, unless it has ended."""
        generation = self.generation
        return None if generation is None or generation.state is GenerationState.ENDED else generation

    def condition(self, kind: str) -> Condition | None:
        """The condition of this type, or None if it was never set."""
        return next((condition for condition in self.conditions if condition.type == kind), None)


PRINTER_COLUMNS: tuple[tuple[str, str, str, int], ...] = (
    # name, type, JSONPath, priority (0: always shown)
    ("Phase", "string", ".status.phase", 0),
    ("Step", "string", ".status.progress.display", 0),
    ("Loss", "number", ".status.progress.loss", 0),
    ("World", "integer", ".status.members.worldSize", 0),
    ("On-Demand", "integer", ".status.members.onDemand", 0),
    ("Spot", "integer", ".status.members.spot", 0),
    ("Gen", "integer", ".status.generation.number", 0),
    ("Preempted", "integer", ".status.preemptions", 0),
    ("Redone", "integer", ".status.stepsRedone", 0),
    ("Goodput", "string", ".status.goodputDisplay", 0),
    ("Cost", "string", ".status.cost.display", 0),
    ("Age", "date", ".metadata.creationTimestamp", 0),
    ("Failures", "integer", ".status.failures", 1),
    ("Committed", "integer", ".status.commit.step", 1),
    ("Tokens/s", "number", ".status.progress.tokensPerSecond", 1),
    ("Message", "string", ".status.message", 1),
)
