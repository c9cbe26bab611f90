"""How the ranks train: strategy, precision, sharding, batch."""

from __future__ import annotations

from enum import StrEnum
from typing import Annotated

from pydantic import Field

from .resource import FreeForm, Resource


class Strategy(StrEnum):
    AUTO = "auto"
    DDP = "ddp"
    FSDP = "fsdp"
    DEEPSPEED = "deepspeed"


class Precision(StrEnum):
    FP32 = "fp32"
    BF16 = "bf16"
    FP16 = "fp16"


class Sharding(StrEnum):
    """FULL: each rank has a part of everything. HYBRID: each node has everything, shared out over its ranks."""

    FULL = "full"
    HYBRID = "hybrid"


class Fsdp(Resource):
    """Settings of FSDP2. `reshardAfterForward: false` keeps parameters gathered between forward and backward;
    `offload` keeps parameters, gradients and optimizer state in the node's memory."""

    sharding: Sharding = Sharding.FULL
    reshard_after_forward: bool = True
    offload: bool = False


class DeepSpeed(Resource):
    """Settings of DeepSpeed. `zeroStage` (default: that of `config`, or 2) is what the ranks share out: nothing (0),
    optimizer state (1), also gradients (2), also parameters (3). `config` is a DeepSpeed JSON for the rest; what the
    job says itself (batch, precision) is left out there or "auto"."""

    # The API server checks the default {} as it is, before it fills in the defaults inside: hence has().
    cel_rules = (
        (
            "!has(self.offloadOptimizer) || !self.offloadOptimizer || !has(self.zeroStage) || self.zeroStage >= 1",
            "deepspeed.offloadOptimizer needs zeroStage 1, 2 or 3; raise it, or don't offload",
        ),
        (
            "!has(self.offloadParameters) || !self.offloadParameters || (has(self.zeroStage) && self.zeroStage == 3)",
            "deepspeed.offloadParameters needs zeroStage 3; set it, or don't offload",
        ),
    )
    zero_stage: Annotated[int | None, Field(ge=0, le=3)] = None
    offload_optimizer: bool = False
    offload_parameters: bool = False
    config: FreeForm = FreeForm()


class Batch(Resource):
    """`global` samples make one optimizer step, whatever the number of nodes; `micro` of them at once a rank."""

    cel_rules = (
        ("self.micro <= self.global", "batch.micro is larger than batch.global; lower micro or raise global"),
        (
            "self.global == oldSelf.global",
            "batch.global can't change while a job exists: it would change what is trained; make a new job",
        ),
    )
    global_: Annotated[int, Field(ge=1, alias="global")]
    micro: Annotated[int, Field(ge=1)] = 1
