"""What a user asks for: the spec of a TrainingJob."""

from __future__ import annotations

from enum import StrEnum
from typing import Annotated

from pydantic import Field

from spottrain_api.contract.assignments import CapacityType
from spottrain_api.settings.entrypoint import Entrypoint
from spottrain_api.settings.resource import Line, Resource
from spottrain_api.settings.training import TrainingSettings
from spottrain_api.v1alpha1.budget import Budget
from spottrain_api.v1alpha1.capacity import Capacity, Nodes
from spottrain_api.v1alpha1.checkpoint import Checkpoint
from spottrain_api.v1alpha1.containers import EnvVar, Resources
from spottrain_api.v1alpha1.pod_template import PodTemplate

# Whether the job sets something for a strategy. CEL knows no field of a free JSON, but its size.
_SET = {
    "fsdp": "has(self.fsdp.sharding) && self.fsdp.sharding != 'full' || "
    "has(self.fsdp.reshardAfterForward) && !self.fsdp.reshardAfterForward || "
    "has(self.fsdp.offload) && self.fsdp.offload",
    "deepspeed": "has(self.deepspeed.zeroStage) || "
    "has(self.deepspeed.offloadOptimizer) && self.deepspeed.offloadOptimizer || "
    "has(self.deepspeed.offloadParameters) && self.deepspeed.offloadParameters || "
    "has(self.deepspeed.config) && dyn(self.deepspeed.config).size() > 0",
}


# The field of `capacity` that limits the nodes of a type.
_LIMITS = {CapacityType.ON_DEMAND.value: "onDemand", CapacityType.SPOT.value: "spot"}


def _is_unpriced(kind: str, limit: str) -> str:
    """The CEL test whether the job may use nodes of a type whose price it doesn't give."""
    pools, general = "self.capacity.pools", f"self.capacity.{limit}"
    of_kind = f"has({pools}) && {pools}.exists(pool, pool.capacityType == '{kind}'"
    is_used = f"(!has({general}.max) || {general}.max > 0)"
    has_nodes = f"(!has({pools}) || {pools}.size() == 0 || {of_kind}))"
    return f"{is_used} && {has_nodes} && !has({general}.pricePerHour) && !({of_kind} && has(pool.pricePerHour)))"


class CleanPodPolicy(StrEnum):
    """Which pods are deleted at the end of a job.

    - Running: those that have not ended by themselves. The others stay, with their logs, as long as the job does.
    - All: every pod.
    """

    RUNNING = "Running"
    ALL = "All"


class RunPolicy(Resource):
    """When to pause, give up and clean up."""

    suspend: Annotated[
        bool,
        Field(
            description="Whether the job is paused: it commits, ends its generation and holds no nodes until this is "
            "false again."
        ),
    ] = False
    failure_budget: Annotated[
        int,
        Field(
            ge=0,
            description="Number of failures that are retried; the next one fails the job. Preemptions never count, "
            "and mistakes that a retry can't mend fail the job at once.",
        ),
    ] = 3
    active_deadline_seconds: Annotated[
        int | None,
        Field(
            ge=1,
            description="Seconds from the first generation's start after which the job commits and fails. Pauses "
            "count. Default: no limit.",
        ),
    ] = None
    ttl_seconds_after_finished: Annotated[
        int | None,
        Field(
            ge=0,
            description="Seconds from the end of the job until its TrainingJob is deleted; commits stay. "
            "Default: it is never deleted.",
        ),
    ] = None
    clean_pod_policy: Annotated[
        CleanPodPolicy,
        Field(
            description="Which pods are deleted when the job has succeeded or failed. `Running`: those that have not "
            "ended by themselves. The pods of the last generation end, hold no resources, and keep their logs until "
            "the job is deleted. `All`: every pod."
        ),
    ] = CleanPodPolicy.RUNNING
    hang_timeout_seconds: Annotated[
        int,
        Field(
            ge=5,
            description="Seconds in which no rank makes a step, after which the generation counts as hung. Once all "
            "ranks have left the loop and save, startTimeoutSeconds counts if it is longer. A script that opens no "
            "session has no such limit, nor has what a script does after its session.",
        ),
    ] = 600
    start_timeout_seconds: Annotated[
        int,
        Field(
            ge=5,
            description="Seconds from a generation's start to its first step after which it counts as hung. Raise it "
            "if the model takes longer to load or to compile. A script that opens no session has no such limit.",
        ),
    ] = 900


class RunSettings(Resource):
    """What runs, and on which nodes."""

    profile: Annotated[
        Line | None,
        Field(
            min_length=1,
            max_length=253,
            description="TrainingProfile of the cluster from which the job takes image, pools, prices and "
            "tolerations that it doesn't name itself, and whose limits it keeps to. status.profile has what it "
            "took. Default: that of the name `default`, if there is one when the job first looks for nodes.",
        ),
    ] = None
    image: Annotated[
        Line,
        Field(
            max_length=1024,
            description="Container image with the program, torch and the spottrain trainer. Default: that of the "
            "profile. Required without one.",
        ),
    ] = ""
    entrypoint: Entrypoint
    env: Annotated[tuple[EnvVar, ...], Field(max_length=256, description="Environment variables of the ranks.")] = ()
    resources: Annotated[
        Resources | None,
        Field(
            description="CPU, memory and accelerators of the trainer, as in a container. "
            "Default: limits with one nvidia.com/gpu per process. With this field, pods get only the GPUs that its "
            "limits name."
        ),
    ] = None
    pod_template: PodTemplate = PodTemplate()
    processes_per_node: Annotated[
        int, Field(ge=1, le=64, description="Number of ranks on each node, usually one per accelerator.")
    ] = 1
    nodes: Nodes
    capacity: Capacity = Capacity()


# Fields are in the order of the bases from the last to the first, in the CRD and in the reference.
class TrainingJobSpec(TrainingSettings, RunSettings):
    """What the user asks for: program, nodes, how to train, and where commits go."""

    cel_rules = (
        (
            "self.image != '' || has(self.profile)",
            "image is missing; name the container image with the program, or a profile that has one",
        ),
        (
            "has(self.profile) == has(oldSelf.profile) && (!has(self.profile) || self.profile == oldSelf.profile)",
            "profile can't change while a job exists, which keeps what it took from its profile; make a new job with "
            "another checkpoint.uri",
        ),
        (
            "!self.checkpoint.uri.startsWith('az://') || has(self.checkpoint.endpointURL) || has(self.env) && "
            "self.env.exists(v, v.name in ['AZURE_STORAGE_ACCOUNT', 'AZURE_STORAGE_CONNECTION_STRING'])",
            "checkpoint.endpointURL: az:// needs the address of the storage account, such as "
            "https://account.blob.core.windows.net; write it, or set AZURE_STORAGE_ACCOUNT in env",
        ),
        (
            "type(self.capacity.onDemand.min) == string && self.capacity.onDemand.min.endsWith('%') || "
            "int(self.capacity.onDemand.min) <= self.nodes.max",
            "capacity.onDemand.min is larger than nodes.max; lower the on-demand floor or raise nodes.max",
        ),
        (
            "!has(self.capacity.onDemand.max) || !has(self.capacity.spot.max) || "
            "self.capacity.onDemand.max + self.capacity.spot.max >= self.nodes.min",
            "capacity.onDemand.max and capacity.spot.max together are less than nodes.min; raise one of them",
        ),
        *(
            (
                "!has(self.capacity.pools) || self.capacity.pools.size() == 0 || "
                f"self.capacity.pools.exists(pool, (pool.capacityType == 'spot') != ('{kind}' == 'spot')) || "
                f"!has(self.capacity.{limit}.max) || self.capacity.{limit}.max >= self.nodes.min",
                f"capacity.pools has only {kind} pools, and capacity.{limit}.max is less than nodes.min; raise it, "
                "lower nodes.min, or add a pool of the other type",
            )
            for kind, limit in _LIMITS.items()
        ),
        (
            "self.batch.global >= self.nodes.max * self.processesPerNode * self.batch.multipleOf",
            "batch.global is below the largest world size (nodes.max times processesPerNode) times batch.multipleOf, "
            "which leaves a rank without a sample; raise batch.global or lower nodes.max",
        ),
        (
            "self.precision != 'fp16' || self.strategy == 'deepspeed'",
            "precision fp16 needs the strategy deepspeed, which scales the loss; set that strategy, or use bf16",
        ),
        *(
            (
                f"self.strategy in ['auto', '{strategy}'] || !({is_set})",
                f"{strategy} holds settings that have no effect with this strategy; remove them, or set strategy "
                f"{strategy} or auto",
            )
            for strategy, is_set in _SET.items()
        ),
        (
            "!has(self.fsdp.sharding) || self.fsdp.sharding != 'hybrid' || self.processesPerNode > 1",
            "fsdp.sharding hybrid shards over the ranks of a node, but processesPerNode is 1; raise it, or use full",
        ),
        (
            "!has(self.resources) || !has(self.resources.claims) || self.resources.claims.all(claim, "
            "has(self.podTemplate.resourceClaims) && "
            "self.podTemplate.resourceClaims.exists(known, known.name == claim.name))",
            "resources.claims names a claim that is not in podTemplate.resourceClaims; add it there, or correct the "
            "name",
        ),
        (
            "!has(self.podTemplate.network) || self.podTemplate.network == 'tcpx' || (has(self.resources) && "
            "((has(self.resources.claims) && self.resources.claims.size() > 0) || (has(self.resources.limits) && "
            "self.resources.limits.exists(d, self.podTemplate.network == 'efa' ? d == 'vpc.amazonaws.com/efa' : "
            "d.contains('/') && !d.endsWith('/gpu')))))",
            "podTemplate.network needs the node's network devices in resources.limits, such as "
            "vpc.amazonaws.com/efa: 32 or rdma/hca: 1, or in resources.claims; add them",
        ),
        *(
            (
                f"!has(self.budget) || has(self.profile) || !({_is_unpriced(kind, limit)})",
                f"budget.maxCost bounds nothing without prices, and {kind} nodes have none; set "
                f"capacity.{limit}.pricePerHour, or capacity.{limit}.max to 0",
            )
            for kind, limit in _LIMITS.items()
        ),
        (
            "!has(self.budget) || !has(oldSelf.budget) || self.capacity.currency == oldSelf.capacity.currency",
            "capacity.currency can't change while the job has a budget, as what it has cost counts from 0 then; "
            "remove the budget first",
        ),
        *(
            (
                f"self.{field} == oldSelf.{field}",
                f"{field} can't change while a job exists: the run would be a different one; make a new job with "
                "another checkpoint.uri",
            )
            for field in ("strategy", "precision", "seed")
        ),
    )
    checkpoint: Checkpoint
    run_policy: RunPolicy = RunPolicy()
    budget: Budget | None = None
