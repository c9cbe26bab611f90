"""What ranks report through the run directory.

They report progress, failures, and how they ended.
"""

from __future__ import annotations

import signal
from datetime import timedelta
from enum import StrEnum
from typing import Annotated

from pydantic import AwareDatetime, Field

from spottrain_api.contract.message import Amount, Message, Text


class CommitRef(Message):
    """A committed checkpoint: what HEAD named when it was read or written."""

    generation: Annotated[int, Field(description="Number of the generation that committed it.")]
    step: Annotated[int, Field(description="Optimizer steps that it holds, counted from the job's start.")]
    manifest: Annotated[str, Field(description="Path of the commit's manifest below checkpoint.uri.")]
    committed_at: Annotated[AwareDatetime, Field(description="Time at which it was saved.")]


class CheckpointTimings(Message):
    """Measured durations of the newest checkpoint, in seconds.

    `forecast_seconds` is the forecast for the whole save, made before its start; None for the first save.
    """

    staging_seconds: float
    upload_seconds: float
    commit_seconds: float
    forecast_seconds: float | None = None

    @property
    def total_seconds(self) -> float:
        """Seconds from the start of staging until HEAD names the checkpoint."""
        return self.staging_seconds + self.upload_seconds + self.commit_seconds


class FailureReason(StrEnum):
    """Why a generation failed on a member.

    `FATAL_REASONS` aren't retried: a retry would fail in the same way.
    """

    SCRIPT_ERROR = "ScriptError"
    KILLED = "Killed"
    HANG = "Hang"
    LOST_PEER = "LostPeer"
    RENDEZVOUS_FAILED = "RendezvousFailed"
    START_FAILED = "StartFailed"
    ENTRYPOINT_NOT_FOUND = "EntrypointNotFound"
    INVALID_CONFIGURATION = "InvalidConfiguration"
    DEVICE_FAILED = "DeviceFailed"
    CHECKPOINT_STORAGE_UNAVAILABLE = "CheckpointStorageUnavailable"
    CHECKPOINT_STORAGE_FULL = "CheckpointStorageFull"
    CHECKPOINT_STORAGE_MISSING = "CheckpointStorageMissing"
    CHECKPOINT_ACCESS_DENIED = "CheckpointAccessDenied"
    CHECKPOINT_STORE_UNFIT = "CheckpointStoreUnfit"
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
        FailureReason.CHECKPOINT_STORE_UNFIT,
        FailureReason.CHECKPOINT_INCOMPATIBLE,
        FailureReason.CHECKPOINT_DAMAGED,
        FailureReason.TRAINING_UNSTABLE,
    }
)


class Failure(Message):
    """What went wrong, with a sentence for the user.

    - exit_code: the worker's. Negative: a signal.
    - fence: the newer generation that fenced this one, if that is the failure.
    - traceback: the last lines of the script's traceback, for the event of the failure.
    """

    reason: FailureReason
    message: Text
    exit_code: int | None = None
    rank: int | None = None
    fence: int | None = None
    traceback: Text | None = None


def is_aborted(failure: Failure) -> bool:
    """Whether the rank was ended by SIGABRT, as by NCCL's watchdog after the loss of another rank."""
    aborts = (-signal.SIGABRT, 128 + signal.SIGABRT)
    return failure.reason is FailureReason.KILLED and failure.exit_code in aborts


class MemoryEstimate(Message):
    """Estimate of the memory that a rank needs at the peak of a step, in bytes."""

    total: Annotated[
        Amount, Field(description="Bytes that a rank needs on its accelerator or, without one, on the CPU.")
    ]
    available: Annotated[
        Amount, Field(description="Bytes of a rank's accelerator or, without one, of its share of the node's memory.")
    ]
    parameters: Annotated[Amount, Field(description="Bytes of the parameters.")]
    gradients: Annotated[Amount, Field(description="Bytes of the gradients.")]
    optimizer: Annotated[Amount, Field(description="Bytes of the optimizer's state.")]
    activations: Annotated[Amount, Field(description="Bytes of the activations, in forward and backward.")]
    working: Annotated[
        Amount, Field(description="Bytes that come and go in a step: what is gathered, cast or reduced.")
    ]
    host: Annotated[
        Amount, Field(description="Bytes that a rank needs in the node's memory, for what is offloaded.")
    ] = 0


class StrategyChoice(Message):
    """What `strategy: auto` chose.

    The first generation chooses. Commits carry the choice, and later generations keep it.
    """

    strategy: Annotated[str, Field(description="The chosen strategy: ddp, fsdp or deepspeed.")]
    zero_stage: Annotated[
        int | None, Field(description="The chosen deepspeed.zeroStage. Absent with other strategies.")
    ] = None
    offload_optimizer: Annotated[
        bool, Field(description="Whether the optimizer's state is kept in the node's memory.")
    ] = False
    offload_parameters: Annotated[
        bool, Field(description="Whether the parameters are kept in the node's memory.")
    ] = False
    name: Annotated[str, Field(description="The choice in a few words, for people.")]
    reason: Annotated[str, Field(description="Why it was chosen, in a sentence.")]
    memory: MemoryEstimate


class TrainerPhase(StrEnum):
    """Stage that a rank is in.

    It is STARTING until the rank has resumed, then TRAINING, SAVING before its end, and DONE after
    its session. The script may go on then.
    """

    STARTING = "starting"
    TRAINING = "training"
    SAVING = "saving"
    DONE = "done"


class Progress(Message):
    """A rank's newest state; the agent forwards that of its local rank 0.

    `step` counts the optimizer steps completed since the job's start (not since this generation's).
    `first_step_at` is the time at which this generation completed its first step. `tokens_per_second` is the sum
    over all ranks. Of `step_seconds` this rank waits `data_wait_seconds` for data; both are running means.
    `waited_seconds` and `stalled_seconds` are sums since this generation's first step: how long this rank waited for
    data, and how long saves in the background kept it from training. `memory_bytes` is its peak memory in this
    generation, on its accelerator or, without one, on the CPU. `checkpoint_interval_seconds` is the planned time from
    one commit to the next. `undecodable_samples` is how many samples of shards all ranks of its node have left out.
    `epoch` counts the epochs of the data up to this step, with the share of that under way; None if there are none.
    The node has fetched `fetched_bytes` of shards into its cache. Of these, a rank or a worker has waited for
    `late_bytes`.
    """

    generation: int
    phase: TrainerPhase = TrainerPhase.STARTING
    step: int = 0
    start_step: int = 0
    total_steps: Amount | None = None
    loss: float | None = None
    tokens_per_second: float | None = None
    step_seconds: float | None = None
    data_wait_seconds: float | None = None
    waited_seconds: float = 0.0
    stalled_seconds: float = 0.0
    memory_bytes: int | None = None
    samples_per_second: float | None = None
    epoch: float | None = None
    undecodable_samples: int = 0
    fetched_bytes: int = 0
    late_bytes: int = 0
    first_step_at: AwareDatetime | None = None
    last_step_at: AwareDatetime | None = None
    updated_at: AwareDatetime
    commit: CommitRef | None = None
    checkpoint: CheckpointTimings | None = None
    # Why commits can't be made or read, while training continues; None again after the next commit.
    checkpoint_failure: Failure | None = None
    # Why old commits can't be deleted, and how much stays; None if the last clean-up has succeeded.
    clean_up_failure: Text | None = None
    drain_seen_at: AwareDatetime | None = None
    # Steps of the run that stability skipped or undid, and how often it rolled the run back.
    skipped_steps: int = 0
    rollbacks: int = 0
    # How often the ranks commit and why, and what differed from the plan: sentences for the status.
    checkpoint_interval: str | None = None
    checkpoint_interval_seconds: float | None = None
    message: Text | None = None
    strategy: StrategyChoice | None = None
    # Milestones of the start, for the recovery benchmark: the time of each, by name.
    milestones: dict[str, AwareDatetime] = Field(default_factory=dict)

    def shifted(self, offset: timedelta) -> Progress:
        """The same by a clock that is ahead by `offset`.

        The commit is as it was written, maybe by another clock.
        """
        names = ("first_step_at", "last_step_at", "updated_at", "drain_seen_at")
        moments = {name: at + offset for name in names if (at := getattr(self, name)) is not None}
        milestones = {name: at + offset for name, at in self.milestones.items()}
        return self.model_copy(update={**moments, "milestones": milestones})


class OutcomeKind(StrEnum):
    DRAINED = "drained"
    SUCCEEDED = "succeeded"
    FAILED = "failed"


class Outcome(Message):
    """How a rank's session ended, as it reports itself.

    A rank that leaves none, or has succeeded, is judged by its exit code.
    """

    generation: int
    kind: OutcomeKind
    step: int
    commit: CommitRef | None = None
    failure: Failure | None = None
