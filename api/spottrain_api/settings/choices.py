"""Values that a job's user chooses from, by their names in YAML.

The spec holds them as enums, so that the API server refuses any others.
"""

from __future__ import annotations

from enum import StrEnum


class Strategy(StrEnum):
    """How the model is spread over the ranks. Can't change while the job exists.

    - auto: the first of ddp, fsdp and deepspeed that fits into the ranks' memory, chosen at the first start.
    - ddp: each rank holds the whole model (DistributedDataParallel).
    - fsdp: the ranks share out parameters, gradients and optimizer state (FSDP2).
    - deepspeed: ZeRO, with the settings in `deepspeed`.
    """

    AUTO = "auto"
    DDP = "ddp"
    FSDP = "fsdp"
    DEEPSPEED = "deepspeed"


class Precision(StrEnum):
    """Number format of forward and backward; weights are updated in fp32.

    Can't change while the job exists.

    - fp32: 32 bits.
    - bf16: bfloat16.
    - fp16: half precision with a loss scaler; needs the strategy deepspeed.
    """

    FP32 = "fp32"
    BF16 = "bf16"
    FP16 = "fp16"


class Sharding(StrEnum):
    """Over which ranks FSDP2 shards.

    - full: over all ranks.
    - hybrid: over the ranks of a node, with a replica on each node; needs processesPerNode above 1.
    """

    FULL = "full"
    HYBRID = "hybrid"


class OnNotice(StrEnum):
    """When to commit and stop after a preemption notice.

    - immediate: at the next step.
    - lastSafe: when the rest of the notice is just enough to commit; until then training continues.
    """

    IMMEDIATE = "immediate"
    LAST_SAFE = "lastSafe"


class StabilityAction(StrEnum):
    """What to do about a step that would spoil the model.

    - fail: end the job.
    - skip: make no update, and continue with the next samples.
    - rollback: undo everything since the newest commit, and continue with the next samples.
    """

    FAIL = "fail"
    SKIP = "skip"
    ROLLBACK = "rollback"
