"""What the run directory gives to ranks: the settings of their job, and requests to drain."""

from __future__ import annotations

from datetime import datetime, timedelta
from typing import Any

from pydantic import Field

from spottrain_api.contract.choices import AUTO_INTERVAL, OnNotice, Precision, Sharding, StabilityAction, Strategy
from spottrain_api.contract.message import Message
from spottrain_api.contract.replicas import ReplicaSettings
from spottrain_api.contract.reports import CommitRef


class DrainRequest(Message):
    """Request to stop together at a step boundary, commit there, and end with the outcome `drained`.

    `is_preemption` says that a cloud takes a node at the deadline: stopping long before it gains nothing.
    """

    reason: str
    deadline: datetime
    requested_at: datetime
    is_preemption: bool = False

    def shifted(self, offset: timedelta) -> DrainRequest:
        """The same request by a clock that is ahead by `offset`."""
        moments = {"deadline": self.deadline + offset, "requested_at": self.requested_at + offset}
        return self.model_copy(update=moments)


class Interruptions(Message):
    """Preemptions of the job before this generation. `num_noticed` of `num` came with notice. After `num_covered` of
    the others training resumed from replicas."""

    num: int = 0
    num_noticed: int = 0
    num_covered: int = 0
    observed_seconds: float = 0.0


class CheckpointConfig(Message):
    """Where and how often to commit. `interval` is "auto", "<n>steps", "<n>s" or "<n>m". `on_notice` is
    "immediate" or "lastSafe". "auto" derives the interval from `interruptions`."""

    uri: str | None = None
    interval: str = AUTO_INTERVAL
    keep: int = 2
    keep_every: int | None = None
    on_notice: str = OnNotice.IMMEDIATE.value
    interruptions: Interruptions = Interruptions()
    endpoint_url: str | None = None


class FsdpConfig(Message):
    """Settings of FSDP2. `sharding` is "full" (over all ranks) or "hybrid" (over the ranks of a node, with
    replicas over the nodes)."""

    sharding: str = Sharding.FULL.value
    reshard_after_forward: bool = True
    offload: bool = False


class DeepSpeedConfig(Message):
    """Settings of DeepSpeed. `zero_stage` None: the stage in `config`, or 2. `config` is a DeepSpeed JSON."""

    zero_stage: int | None = None
    offload_optimizer: bool = False
    offload_parameters: bool = False
    config: dict[str, Any] = Field(default_factory=dict)


class LossSpikeConfig(Message):
    """What counts as a loss that jumps, and what to do about it.

    Attributes:
        factor: A loss jumps if it is more than this many times the median before it.
        window: Good steps of which the median is taken.
        action: What to do about the step.
    """

    factor: float
    window: int = 50
    action: StabilityAction = StabilityAction.ROLLBACK


class StabilityConfig(Message):
    """What to do about steps that would spoil the model.

    Attributes:
        non_finite: What to do if a loss or gradient is not finite.
        loss_spike: What to do if the loss jumps. None: nothing.
        max_rollbacks: A run that has to be rolled back to one commit more often fails.

    Example:
        >>> from spottrain import LossSpikeConfig, StabilityAction, StabilityConfig
        >>> stability = StabilityConfig(non_finite=StabilityAction.SKIP, loss_spike=LossSpikeConfig(factor=3.0))
        >>> stability.loss_spike.action
        <StabilityAction.ROLLBACK: 'rollback'>
    """

    non_finite: StabilityAction = StabilityAction.FAIL
    loss_spike: LossSpikeConfig | None = None
    max_rollbacks: int = 3


class TrainerConfig(Message):
    """Settings of the ranks of a generation (run.json)."""

    job: str
    namespace: str = "default"
    generation: int
    attempt_id: str  # unique per generation: also torchrun's rendezvous id
    seed: int = 0
    strategy: str = Strategy.AUTO.value
    precision: str = Precision.FP32.value
    # The smallest world size that the job may have. None: the world size of this generation.
    min_world_size: int | None = None
    # These two apply to the model's blocks, under any strategy.
    activation_checkpointing: bool = False
    compile: bool = False
    fsdp: FsdpConfig = FsdpConfig()
    deepspeed: DeepSpeedConfig = DeepSpeedConfig()
    global_batch: int = 1
    micro_batch: int = 1
    checkpoint: CheckpointConfig = CheckpointConfig()
    stability: StabilityConfig | None = None
    # The newest commit that the operator knows. Ranks read HEAD themselves; a HEAD older than this is an error.
    resume: CommitRef | None = None
    replicas: ReplicaSettings | None = None
