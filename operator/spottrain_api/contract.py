"""What passes between the operator, the watcher, the agents and the ranks.

One module holds every label, environment name, file name and message, so that two parts can't disagree.
Messages travel as JSON with camelCase keys, over HTTP (agent and operator, agent and watcher) and as small
files in a generation's *run directory* (agent and ranks). Each message carries the whole current state, so
a lost, repeated or late one does no harm.

Times are timezone-aware UTC; durations are seconds.
"""

from __future__ import annotations

import hashlib
import os
from datetime import datetime
from enum import StrEnum
from pathlib import Path
from typing import Any, Self

from pydantic import BaseModel, ConfigDict, Field
from pydantic.alias_generators import to_camel

GROUP = "spottrain.dev"
VERSION = "v1alpha1"
API_VERSION = f"{GROUP}/{VERSION}"
PLURAL = "trainingjobs"
KIND = "TrainingJob"

# Labels and annotations of the pods that the operator creates.
LABEL_JOB = f"{GROUP}/job"
LABEL_JOB_UID = f"{GROUP}/job-uid"
LABEL_CAPACITY_TYPE = f"{GROUP}/capacity-type"
LABEL_SEQUENCE = f"{GROUP}/sequence"
LABEL_TEMPLATE_HASH = f"{GROUP}/template-hash"
LABEL_MANAGED_BY = "app.kubernetes.io/managed-by"
MANAGED_BY = "spottrain"

# What the watcher leaves on a node that is about to go: the Notice as JSON, and a taint against new pods.
ANNOTATION_NOTICE = f"{GROUP}/notice"
TAINT_PREEMPTION = f"{GROUP}/preemption"

# Audience of the projected token with which an agent authenticates to the operator.
TOKEN_AUDIENCE = "spottrain"

# The control API and the watcher's notice API. Long polls end after this many seconds with 204.
CONTROL_PORT = 8080
WATCHER_PORT = 9401
LONG_POLL_SECONDS = 25.0
PATH_ASSIGNMENT = "/v1/assignment"
PATH_REPORT = "/v1/report"
PATH_NOTICE = "/v1/notice"
# With which a member's memory says what an object cost it.
PROCESSOR_SECONDS = "Spottrain-Processor-Seconds"

# Environment of a trainer pod, read by the agent.
ENV_CONTROL_URL = "SPOTTRAIN_CONTROL_URL"
ENV_TOKEN_FILE = "SPOTTRAIN_TOKEN_FILE"
ENV_JOB = "SPOTTRAIN_JOB"
ENV_NAMESPACE = "SPOTTRAIN_NAMESPACE"
ENV_POD_NAME = "SPOTTRAIN_POD_NAME"
ENV_POD_UID = "SPOTTRAIN_POD_UID"
ENV_POD_IP = "SPOTTRAIN_POD_IP"
ENV_NODE_NAME = "SPOTTRAIN_NODE_NAME"
ENV_HOST_IP = "SPOTTRAIN_HOST_IP"
ENV_WATCHER_PORT = "SPOTTRAIN_WATCHER_PORT"
ENV_CAPACITY_TYPE = "SPOTTRAIN_CAPACITY_TYPE"
# Where a service account is mounted, for the parts that talk to Kubernetes (operator, watcher).
ENV_SERVICEACCOUNT_DIR = "SPOTTRAIN_SERVICEACCOUNT_DIR"

# Environment of the ranks, beside what torchrun sets.
ENV_RUN_DIR = "SPOTTRAIN_RUN_DIR"
# For scripts that don't use the library: the grace they can count on, and the file that appears with the
# actual deadline (a DrainRequest) when SIGTERM is sent.
ENV_GRACE_SECONDS = "SPOTTRAIN_GRACE_SECONDS"
ENV_DRAIN_FILE = "SPOTTRAIN_DRAIN_FILE"
# If set, every rank appends the ids of the samples it used, step by step, to a file in this folder.
ENV_AUDIT_DIR = "SPOTTRAIN_AUDIT_DIR"

# Files of a generation's run directory.
FILE_RUN = "run.json"  # TrainerConfig, written by the agent before the ranks start
FILE_DRAIN = "drain.json"  # DrainRequest, written by the agent


def progress_file(local_rank: int) -> str:
    """Name of the file in which a rank keeps its newest `Progress`."""
    return f"progress-{local_rank}.json"


def outcome_file(local_rank: int) -> str:
    """Name of the file in which a rank leaves its `Outcome` before it ends."""
    return f"outcome-{local_rank}.json"


class Message(BaseModel):
    """Base of all messages: immutable, camelCase on the wire, unknown fields ignored (newer peers)."""

    model_config = ConfigDict(
        frozen=True, alias_generator=to_camel, populate_by_name=True, extra="ignore", allow_inf_nan=False
    )

    def to_json(self) -> str:
        return self.model_dump_json(by_alias=True, exclude_none=True)

    @classmethod
    def from_json(cls, text: str | bytes) -> Self:
        return cls.model_validate_json(text)

    def write(self, path: Path) -> None:
        """Replace the file at `path` atomically, so that a reader never sees half a message."""
        temporary = path.with_name(f".{path.name}.{os.getpid()}")
        temporary.write_text(self.to_json())
        temporary.replace(path)

    @classmethod
    def read(cls, path: Path) -> Self | None:
        """The message in the file at `path`, or None where there is no such file."""
        try:
            return cls.from_json(path.read_bytes())
        except FileNotFoundError:
            return None


class CapacityType(StrEnum):
    """How a node is bought. The values are those of Karpenter's `karpenter.sh/capacity-type`."""

    ON_DEMAND = "on-demand"
    SPOT = "spot"


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


class CommitRef(Message):
    """A committed checkpoint: what HEAD named when it was read or written."""

    generation: int
    step: int
    manifest: str
    committed_at: datetime


class CheckpointTimings(Message):
    """Measured durations of the newest checkpoint, in seconds, and the bytes this rank wrote.

    `forecast_seconds` is what the save as a whole was expected to take, before it began; None for the first.
    """

    staging_seconds: float
    upload_seconds: float
    commit_seconds: float
    num_bytes: int
    forecast_seconds: float | None = None

    @property
    def total_seconds(self) -> float:
        """From the begin of staging until HEAD names the checkpoint."""
        return self.staging_seconds + self.upload_seconds + self.commit_seconds


class FailureReason(StrEnum):
    """Why a generation failed on a member. `FATAL_REASONS` aren't retried: the next try would end the same."""

    SCRIPT_ERROR = "ScriptError"
    KILLED = "Killed"
    HANG = "Hang"
    LOST_PEER = "LostPeer"
    RENDEZVOUS_FAILED = "RendezvousFailed"
    START_FAILED = "StartFailed"
    ENTRYPOINT_NOT_FOUND = "EntrypointNotFound"
    INVALID_CONFIGURATION = "InvalidConfiguration"
    CHECKPOINT_STORAGE_UNAVAILABLE = "CheckpointStorageUnavailable"
    CHECKPOINT_STORAGE_FULL = "CheckpointStorageFull"
    CHECKPOINT_STORAGE_MISSING = "CheckpointStorageMissing"
    CHECKPOINT_ACCESS_DENIED = "CheckpointAccessDenied"
    CHECKPOINT_INCOMPATIBLE = "CheckpointIncompatible"
    CHECKPOINT_DAMAGED = "CheckpointDamaged"
    CHECKPOINT_SAVE_FAILED = "CheckpointSaveFailed"
    TRAINING_UNSTABLE = "TrainingUnstable"


FATAL_REASONS = frozenset(
    {
        FailureReason.ENTRYPOINT_NOT_FOUND,
        FailureReason.INVALID_CONFIGURATION,
        FailureReason.CHECKPOINT_STORAGE_UNAVAILABLE,
        FailureReason.CHECKPOINT_STORAGE_FULL,
        FailureReason.CHECKPOINT_STORAGE_MISSING,
        FailureReason.CHECKPOINT_ACCESS_DENIED,
        FailureReason.CHECKPOINT_INCOMPATIBLE,
        FailureReason.CHECKPOINT_DAMAGED,
        FailureReason.TRAINING_UNSTABLE,
    }
)


class Failure(Message):
    """What went wrong, as a sentence for the user; `exit_code` is the worker's (negative: a signal). `fence` is the
    generation that shut this one out of the checkpoints, where that is what went wrong."""

    reason: FailureReason
    message: str
    exit_code: int | None = None
    rank: int | None = None
    fence: int | None = None


class DrainRequest(Message):
    """Stop together at a step boundary, commit there, and end with the outcome `drained`.

    `is_preemption`: a cloud takes a node at the deadline, so that nothing is won by stopping long before it.
    """

    reason: str
    deadline: datetime
    requested_at: datetime
    is_preemption: bool = False


class MemoryEstimate(Message):
    """Bytes that a rank is estimated to need at the peak of a step: what is kept, and what comes and goes
    (`activations`, and as `working` what is gathered, cast or reduced). `available` is what a rank has."""

    total: int
    available: int
    parameters: int
    gradients: int
    optimizer: int
    activations: int
    working: int
    host: int = 0


class StrategyChoice(Message):
    """What `strategy: auto` came to. The first generation chooses; commits carry the choice, and later
    generations keep to it. `name` and `reason` are for people."""

    strategy: str
    zero_stage: int | None = None
    offload_optimizer: bool = False
    offload_parameters: bool = False
    name: str
    reason: str
    memory: MemoryEstimate


class TrainerPhase(StrEnum):
    """Where a rank is: STARTING up to and including the resume, then TRAINING, with SAVING before its end."""

    STARTING = "starting"
    TRAINING = "training"
    SAVING = "saving"
    DONE = "done"


class Progress(Message):
    """A rank's newest state; the agent passes on that of its local rank 0.

    `step` counts completed optimizer steps of the job since its beginning (not of this generation).
    `first_step_at` is when this generation completed its first step; `tokens_per_second` is the whole world's.
    """

    generation: int
    phase: TrainerPhase = TrainerPhase.STARTING
    step: int = 0
    start_step: int = 0
    total_steps: int | None = None
    loss: float | None = None
    tokens_per_second: float | None = None
    samples_per_second: float | None = None
    step_seconds: float | None = None
    first_step_at: datetime | None = None
    last_step_at: datetime | None = None
    updated_at: datetime
    commit: CommitRef | None = None
    checkpoint: CheckpointTimings | None = None
    # What keeps commits from being made or read, while training goes on; None again once one is made.
    checkpoint_failure: Failure | None = None
    drain_seen_at: datetime | None = None
    # Steps of the run that left no trace in the model, and how often it was rolled back, for stability's sake.
    skipped_steps: int = 0
    rollbacks: int = 0
    # How often it commits and why so, and what went other than planned; sentences for the status.
    checkpoint_interval: str | None = None
    message: str | None = None
    strategy: StrategyChoice | None = None
    # Milestones of start-up for the recovery benchmark: name -> when.
    milestones: dict[str, datetime] = Field(default_factory=dict)


class OutcomeKind(StrEnum):
    DRAINED = "drained"
    SUCCEEDED = "succeeded"
    FAILED = "failed"


class Outcome(Message):
    """How a rank ended, in its own words. Where none is left behind, the exit code speaks."""

    generation: int
    kind: OutcomeKind
    step: int
    commit: CommitRef | None = None
    failure: Failure | None = None


class Interruptions(Message):
    """What a job has seen of preemptions before this generation: `num_noticed` of `num` came with notice."""

    num: int = 0
    num_noticed: int = 0
    observed_seconds: float = 0.0


class CheckpointConfig(Message):
    """Where and how often to commit. `interval` is "auto", "<n>steps", "<n>s" or "<n>m"; `on_notice` is
    "immediate" or "lastSafe"; `interruptions` are what "auto" reckons with."""

    uri: str | None = None
    interval: str = "auto"
    keep: int = 2
    keep_every: int | None = None
    on_notice: str = "immediate"
    interruptions: Interruptions = Interruptions()
    endpoint_url: str | None = None


class FsdpConfig(Message):
    """How to train with FSDP2. `sharding` is "full" (over all ranks) or "hybrid" (over the ranks of a node, with
    replicas over the nodes)."""

    sharding: str = "full"
    reshard_after_forward: bool = True
    offload: bool = False


class DeepSpeedConfig(Message):
    """How to train with DeepSpeed. `zero_stage` None: that of `config`, or 2. `config` is a DeepSpeed JSON."""

    zero_stage: int | None = None
    offload_optimizer: bool = False
    offload_parameters: bool = False
    config: dict[str, Any] = Field(default_factory=dict)


class MemoryStep(Message):
    """One replicated step, as far as one member's memory holds it: all that the `ranks` of a world of `world_size`
    had staged after `step`. `sequence` counts the generation's replicated steps."""

    generation: int
    sequence: int
    step: int
    world_size: int
    ranks: tuple[int, ...]


class MemoryHolder(Message):
    """A member whose memory holds the shards of these ranks; "address:port"."""

    address: str
    ranks: tuple[int, ...]


class MemoryCheckpoint(Message):
    """A replicated step of which every rank's shard is in the memory of a member that is still there."""

    generation: int
    sequence: int
    step: int
    world_size: int
    holders: tuple[MemoryHolder, ...]


class PeerMemory(Message):
    """Where a member's ranks replicate their shards: into its own memory and its peer's. `peer` None: there is no
    other member. `interval` None: as often as costs little. `resume` is what to begin with, if the store has nothing
    newer. The token opens the memory of all members of the generation, and of no other."""

    token: str
    own: str
    peer: str | None = None
    interval: int | None = None
    resume: MemoryCheckpoint | None = None


class StabilityAction(StrEnum):
    """What to do about a step that would spoil the model. FAIL: end the job. SKIP: make no update. ROLLBACK: undo
    everything since the newest commit, and go on with the next samples."""

    FAIL = "fail"
    SKIP = "skip"
    ROLLBACK = "rollback"


class LossSpikeConfig(Message):
    """A step whose loss is more than `factor` times the median of the `window` good steps before it."""

    factor: float
    window: int = 50
    action: StabilityAction = StabilityAction.ROLLBACK


class StabilityConfig(Message):
    """What to do where a loss or gradient is not finite, and where the loss jumps (None: nothing). A run that has
    to be rolled back to the same commit more than `max_rollbacks` times fails."""

    non_finite: StabilityAction = StabilityAction.FAIL
    loss_spike: LossSpikeConfig | None = None
    max_rollbacks: int = 3


class TrainerConfig(Message):
    """What the ranks of a generation need to know (run.json)."""

    job: str
    namespace: str = "default"
    generation: int
    attempt_id: str  # unique per generation: also torchrun's rendezvous id
    seed: int = 0
    strategy: str = "auto"
    precision: str = "fp32"
    # The smallest world size that the job may have; None: this generation's.
    min_world_size: int | None = None
    # Of the model's blocks, under any strategy.
    activation_checkpointing: bool = False
    compile: bool = False
    fsdp: FsdpConfig = FsdpConfig()
    deepspeed: DeepSpeedConfig = DeepSpeedConfig()
    global_batch: int = 1
    micro_batch: int = 1
    checkpoint: CheckpointConfig = CheckpointConfig()
    stability: StabilityConfig | None = None
    # The newest commit that the operator knows of. Ranks read HEAD itself; an older HEAD than this is an error.
    resume: CommitRef | None = None
    memory: PeerMemory | None = None


class Entrypoint(Message):
    """The user's program: exactly one of `script` (a path in the image) and `module` (as for python -m)."""

    script: str | None = None
    module: str | None = None
    args: tuple[str, ...] = ()
    working_dir: str | None = None


class Member(Message):
    """One pod of a generation."""

    pod: str
    pod_uid: str
    address: str
    node: str
    node_rank: int
    capacity_type: CapacityType
    memory_port: int | None = None


class GenerationAssignment(Message):
    """Who trains together, as one member is told it."""

    number: int
    rendezvous_id: str
    rendezvous_endpoint: str  # "address:port", hosted by the member with node rank 0
    node_rank: int
    num_nodes: int
    processes_per_node: int = 1
    entrypoint: Entrypoint
    trainer: TrainerConfig


class AssignmentAction(StrEnum):
    """WAIT: stay warm. RUN: run the generation. DRAIN: drain it. STOP: stop it at once. EXIT: leave the pod."""

    WAIT = "wait"
    RUN = "run"
    DRAIN = "drain"
    STOP = "stop"
    EXIT = "exit"


class Assignment(Message):
    """What the operator wants of one agent now. A pure function of the job's status.

    STOP and DRAIN name the generation they are about, so that a late one can't hit its successor.
    """

    action: AssignmentAction
    generation: GenerationAssignment | None = None
    drain: DrainRequest | None = None

    @property
    def revision(self) -> str:
        """Changes exactly when the content does; also across restarts of the operator."""
        return hashlib.sha256(self.to_json().encode()).hexdigest()[:16]


class AgentPhase(StrEnum):
    """What the agent's torchrun of `AgentReport.generation` is doing or how it ended."""

    IDLE = "idle"
    STARTING = "starting"
    RUNNING = "running"
    DRAINED = "drained"
    SUCCEEDED = "succeeded"
    FAILED = "failed"
    STOPPED = "stopped"


class AgentReport(Message):
    """An agent's whole current state, sent on every change and every second.

    `generation` 0 means that none was run yet. `rendezvous_port` is free at the pod's address and kept for
    the next generation whose store this agent may host. `step_age_seconds` is the time since the newest
    step (or since the start of the generation), measured by the agent's monotonic clock. `warm` says that the
    interpreter is ready, with torch imported, to start a generation at once. At `memory_port` this member and its
    peers keep replicated shards; `held` is what is there, oldest first.
    """

    pod: str
    pod_uid: str
    generation: int = 0
    phase: AgentPhase = AgentPhase.IDLE
    warm: bool = False
    rendezvous_port: int
    progress: Progress | None = None
    step_age_seconds: float | None = None
    commit: CommitRef | None = None
    failure: Failure | None = None
    notices: tuple[Notice, ...] = ()
    memory_port: int | None = None
    held: tuple[MemoryStep, ...] = ()
    sent_at: datetime
