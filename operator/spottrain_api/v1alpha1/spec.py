"""What a user asks for: the spec of a TrainingJob."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from .capacity import Capacity, Nodes
from .checkpoint import Checkpoint
from .pod_template import EntrypointSpec, EnvVar, PodTemplate, Resources
from .resource import Resource
from .stability import Stability
from .training import Batch, DeepSpeed, Fsdp, Precision, Strategy


class RunPolicy(Resource):
    """When to pause, give up and clean up. Preemptions never count against `failureBudget`."""

    suspend: bool = False
    failure_budget: Annotated[int, Field(ge=0)] = 3
    active_deadline_seconds: Annotated[int | None, Field(ge=1)] = None
    ttl_seconds_after_finished: Annotated[int | None, Field(ge=0)] = None
    hang_timeout_seconds: Annotated[int, Field(ge=5)] = 600
    start_timeout_seconds: Annotated[
        int, Field(ge=5, description="Longest time from a generation's start to its first step.")
    ] = 900


class TrainingJobSpec(Resource):
    """A training run on a mix of on-demand and spot nodes."""

    cel_rules = (
        (
            "self.capacity.onDemand.min <= self.nodes.max",
            "capacity.onDemand.min is larger than nodes.max; lower the on-demand floor or raise nodes.max",
        ),
        (
            "!has(self.capacity.onDemand.max) || !has(self.capacity.spot.max) || "
            "self.capacity.onDemand.max + self.capacity.spot.max >= self.nodes.min",
            "capacity.onDemand.max and capacity.spot.max together are less than nodes.min; raise one of them",
        ),
        (
            "self.batch.global >= self.nodes.max * self.processesPerNode",
            "batch.global is below the largest world size (nodes.max times processesPerNode), so that some rank "
            "would have no sample; raise batch.global or lower nodes.max",
        ),
        (
            "self.precision != 'fp16' || self.strategy == 'deepspeed'",
            "precision fp16 needs the strategy deepspeed, which scales the loss; use bf16, or that strategy",
        ),
        (
            "!has(self.fsdp.sharding) || self.fsdp.sharding != 'hybrid' || self.processesPerNode > 1",
            "fsdp.sharding hybrid shards over the ranks of a node, and processesPerNode is 1; raise it, or use full",
        ),
        (
            "self.strategy == oldSelf.strategy && self.precision == oldSelf.precision && self.seed == oldSelf.seed",
            "strategy, precision and seed can't change while a job exists: the run would be another; make a new job",
        ),
    )
    image: Annotated[str, Field(min_length=1, max_length=1024)]
    entrypoint: EntrypointSpec
    env: Annotated[tuple[EnvVar, ...], Field(max_length=256)] = ()
    resources: Resources | None = None
    pod_template: PodTemplate = PodTemplate()
    processes_per_node: Annotated[int, Field(ge=1, le=64)] = 1
    nodes: Nodes
    capacity: Capacity = Capacity()
    strategy: Strategy = Strategy.AUTO
    precision: Precision = Precision.FP32
    fsdp: Fsdp = Fsdp()
    deepspeed: DeepSpeed = DeepSpeed()
    activation_checkpointing: Annotated[
        bool, Field(description="Compute the activations of the model's blocks again in backward, to save memory.")
    ] = False
    compile: Annotated[
        bool, Field(description="Run the model's blocks through torch.compile, in every generation anew.")
    ] = False
    batch: Batch
    seed: Annotated[int, Field(ge=0)] = 0
    checkpoint: Checkpoint
    stability: Stability | None = None
    run_policy: RunPolicy = RunPolicy()
