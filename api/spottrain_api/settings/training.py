"""How the ranks train: strategy, precision, sharding, batch."""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import Field

from spottrain_api.settings.checkpoint import CheckpointConfig
from spottrain_api.settings.choices import Precision, Sharding, Strategy
from spottrain_api.settings.resource import Resource
from spottrain_api.settings.stability import StabilityConfig


class FsdpConfig(Resource):
    """Settings of FSDP2, for the strategy fsdp."""

    sharding: Sharding = Sharding.FULL
    reshard_after_forward: Annotated[
        bool,
        Field(
            description="Whether to free gathered parameters after forward and gather them again for backward. "
            "false communicates less and takes more memory."
        ),
    ] = True
    offload: Annotated[
        bool,
        Field(
            description="Whether to keep parameters, gradients and optimizer state in the node's memory instead of "
            "the accelerator's."
        ),
    ] = False


class DeepSpeedConfig(Resource):
    """Settings of DeepSpeed, for the strategy deepspeed."""

    # The API server checks the default {} before it fills in the defaults inside. Therefore the rules use has().
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
    zero_stage: Annotated[
        int | None,
        Field(
            ge=0,
            le=3,
            description="What the ranks share out: nothing (0), optimizer state (1), also gradients (2), also "
            "parameters (3). Default: the stage in `config`, or 2.",
        ),
    ] = None
    offload_optimizer: Annotated[
        bool,
        Field(
            description="Whether to keep optimizer state in the node's memory and update there. "
            "Needs zeroStage 1, 2 or 3."
        ),
    ] = False
    offload_parameters: Annotated[
        bool, Field(description="Whether to keep parameters in the node's memory. Needs zeroStage 3.")
    ] = False
    config: Annotated[
        dict[str, Any],
        Field(
            description="DeepSpeed JSON for all other settings. Leave out what the job says itself, such as batch "
            'and precision, or write "auto" there.',
            json_schema_extra={"x-kubernetes-preserve-unknown-fields": True},
        ),
    ] = {}  # noqa: RUF012 - pydantic copies it for each model


class Batch(Resource):
    """Samples of one optimizer step. They stay the same for any number of nodes."""

    cel_rules = (
        ("self.micro <= self.global", "batch.micro is larger than batch.global; lower micro or raise global"),
        (
            "self.global % self.multipleOf == 0",
            "batch.global is not a multiple of batch.multipleOf; change one of them",
        ),
        (
            "self.micro >= self.multipleOf",
            "batch.micro is smaller than batch.multipleOf; raise micro or lower multipleOf",
        ),
        (
            "self.global == oldSelf.global",
            "batch.global can't change while a job exists: it would change what is trained; make a new job "
            "with another checkpoint.uri",
        ),
    )
    global_: Annotated[
        int,
        Field(
            ge=1,
            alias="global",
            description="Samples in one optimizer step, over all ranks. At least nodes.max times processesPerNode. "
            "Can't change while the job exists.",
        ),
    ]
    micro: Annotated[
        int,
        Field(
            ge=1,
            description="Samples that a rank computes at once, at most. It accumulates the gradients of its share of "
            "the global batch in as many passes as that takes.",
        ),
    ] = 1
    multiple_of: Annotated[
        int,
        Field(
            ge=1,
            description="A number of which the samples of every pass are a multiple, on any number of ranks, for "
            "scripts that need it: 2 for even numbers, the value of `micro` for passes of equal size. Has to divide "
            "`global`.",
        ),
    ] = 1


class TrainingSettings(Resource):
    """The part of a spec that reaches the ranks, with the same fields."""

    strategy: Strategy = Strategy.AUTO
    precision: Precision = Precision.FP32
    fsdp: FsdpConfig = FsdpConfig()
    deepspeed: DeepSpeedConfig = DeepSpeedConfig()
    activation_checkpointing: Annotated[
        bool,
        Field(
            description="Whether to compute the activations of the model's blocks again in backward. It saves memory "
            "and costs time."
        ),
    ] = False
    compile: Annotated[
        bool,
        Field(description="Whether to run the model's blocks through torch.compile, anew in every generation."),
    ] = False
    batch: Batch
    seed: Annotated[
        int,
        Field(
            ge=0,
            description="Seed of the random numbers and of the order of samples. Can't change while the job exists.",
        ),
    ] = 0
    checkpoint: CheckpointConfig = CheckpointConfig()
    stability: Annotated[
        StabilityConfig | None,
        Field(description="What to do about steps that would spoil the model. Default: steps are not judged."),
    ] = None
