"""What a user asks for: the spec of a TrainingJob."""

from __future__ import annotations

from enum import StrEnum
from typing import Annotated

from pydantic import Field

from ..contract import CapacityType, StabilityAction
from .resource import FreeForm, Resource

INTERVAL_PATTERN = r"^(auto|[1-9][0-9]*(steps|s|m))$"
MAX_MEMBERS = 512


class EntrypointSpec(Resource):
    """The program that every rank runs: exactly one of `script` and `module`."""

    cel_rules = (
        (
            "has(self.script) != has(self.module)",
            "entrypoint: give exactly one of script (a path in the image) and module (as for python -m)",
        ),
    )
    script: Annotated[str | None, Field(min_length=1, description="Path of a Python file in the image.")] = None
    module: Annotated[str | None, Field(min_length=1, description="Module to run, as for python -m.")] = None
    args: tuple[str, ...] = ()
    working_dir: str | None = None


class KeySelector(Resource):
    """A key of a ConfigMap or a Secret in the job's namespace."""

    name: str
    key: str
    optional: bool | None = None


class EnvVarSource(Resource):
    config_map_key_ref: KeySelector | None = None
    secret_key_ref: KeySelector | None = None


class EnvVar(Resource):
    """An environment variable of the ranks."""

    cel_rules = (
        (
            "!self.name.startsWith('SPOTTRAIN_') || self.name == 'SPOTTRAIN_AUDIT_DIR'",
            "env: names that begin with SPOTTRAIN_ are the operator's; choose another name",
        ),
    )
    name: Annotated[str, Field(min_length=1, max_length=256)]
    value: str | None = None
    value_from: EnvVarSource | None = None


class Resources(Resource):
    """Resources of one pod, as in a container. Without it: one nvidia.com/gpu per process."""

    requests: dict[str, str] = Field(default_factory=dict)
    limits: dict[str, str] = Field(default_factory=dict)


class Volume(Resource):
    """A volume: emptyDir, configMap, secret or persistentVolumeClaim. Nothing of the host."""

    name: str
    empty_dir: Annotated[FreeForm | None, Field(alias="emptyDir")] = None
    config_map: Annotated[FreeForm | None, Field(alias="configMap")] = None
    secret: FreeForm | None = None
    persistent_volume_claim: Annotated[FreeForm | None, Field(alias="persistentVolumeClaim")] = None


class VolumeMount(Resource):
    name: str
    mount_path: str
    read_only: bool | None = None
    sub_path: str | None = None


class Toleration(Resource):
    key: str | None = None
    operator: str | None = None
    value: str | None = None
    effect: str | None = None
    toleration_seconds: int | None = None


class PodTemplate(Resource):
    """What a job may say about its pods. Everything else is the operator's, so that pods stay restricted."""

    labels: dict[str, str] = Field(default_factory=dict)
    annotations: dict[str, str] = Field(default_factory=dict)
    node_selector: dict[str, str] = Field(default_factory=dict)
    tolerations: Annotated[tuple[Toleration, ...], Field(max_length=32)] = ()
    service_account_name: str | None = None
    image_pull_policy: str | None = None
    image_pull_secrets: Annotated[tuple[dict[str, str], ...], Field(max_length=8)] = ()
    priority_class_name: str | None = None
    volumes: Annotated[tuple[Volume, ...], Field(max_length=32)] = ()
    volume_mounts: Annotated[tuple[VolumeMount, ...], Field(max_length=32)] = ()
    termination_grace_period_seconds: Annotated[int, Field(ge=1, le=3600)] = 120


class Nodes(Resource):
    """How many nodes train together; one pod a node."""

    cel_rules = (
        ("self.min <= self.max", "nodes.min is larger than nodes.max; lower min or raise max"),
        (f"self.max <= {MAX_MEMBERS}", f"nodes.max is above {MAX_MEMBERS}, the most that one job can have"),
    )
    min: Annotated[int, Field(ge=1)] = 1
    max: Annotated[int, Field(ge=1)]


class OnDemandCapacity(Resource):
    """The floor: `min` nodes are always on-demand; up to `max` where spot falls back (default: nodes.max)."""

    cel_rules = (
        (
            "!has(self.max) || self.min <= self.max",
            "capacity.onDemand.min is larger than capacity.onDemand.max; lower min or raise max",
        ),
    )
    min: Annotated[int, Field(ge=0)] = 0
    max: Annotated[int | None, Field(ge=0)] = None
    price_per_hour: Annotated[float | None, Field(ge=0, description="Price of one node, in any currency.")] = None


class SpotCapacity(Resource):
    """The surplus: at most `max` spot nodes (default: nodes.max)."""

    max: Annotated[int | None, Field(ge=0)] = None
    price_per_hour: Annotated[float | None, Field(ge=0, description="Price of one node, in any currency.")] = None


class FallbackPolicy(StrEnum):
    ON_DEMAND = "OnDemand"
    NONE = "None"


class Fallback(Resource):
    """When spot pods have waited `afterSeconds` for a node, on-demand pods take their place, up to
    capacity.onDemand.max; `returnAfterSeconds` later spot is tried again."""

    policy: FallbackPolicy = FallbackPolicy.ON_DEMAND
    after_seconds: Annotated[int, Field(ge=0)] = 300
    return_after_seconds: Annotated[int, Field(ge=1)] = 900


class PoolProvider(StrEnum):
    EKS = "eks"
    KARPENTER = "karpenter"
    GKE = "gke"
    AKS = "aks"
    CUSTOM = "custom"


class Pool(Resource):
    """A node pool to use, with its own price. A custom pool is found by its nodeSelector alone."""

    cel_rules = (
        (
            "self.provider != 'custom' || has(self.nodeSelector)",
            "capacity.pools: a pool with provider custom needs a nodeSelector that finds its nodes",
        ),
    )
    name: Annotated[str, Field(min_length=1)]
    capacity_type: CapacityType
    provider: PoolProvider
    node_selector: dict[str, str] | None = None
    tolerations: Annotated[tuple[Toleration, ...], Field(max_length=16)] = ()
    price_per_hour: Annotated[float | None, Field(ge=0)] = None


class Capacity(Resource):
    """Where the nodes come from. Without `pools`, any node whose labels say that it is spot or on-demand
    (EKS, Karpenter, GKE and AKS labels are known)."""

    on_demand: OnDemandCapacity = OnDemandCapacity()
    spot: SpotCapacity = SpotCapacity()
    fallback: Fallback = Fallback()
    pools: Annotated[tuple[Pool, ...], Field(max_length=16)] = ()


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


class OnNotice(StrEnum):
    """What follows a preemption notice. IMMEDIATE: commit and stop at the next step. LAST_SAFE: train on, and
    commit when what remains of the notice is just enough for it."""

    IMMEDIATE = "immediate"
    LAST_SAFE = "lastSafe"


class Checkpoint(Resource):
    """Where commits go, and how often. `interval`: auto, or a number with steps, s or m ("50steps", "5m").

    The newest `keep` commits are kept and, with `keepEvery`, also the first at or after each of its multiples.
    """

    cel_rules = (
        (
            "self.uri.matches('^((s3|gs)://[^/]+.*|file:///.+)$')",
            "checkpoint.uri: unknown scheme or no bucket; use s3://bucket/prefix, gs://bucket/prefix or "
            "file:///absolute/path",
        ),
        (
            "!has(self.endpointURL) || self.endpointURL.matches('^https?://[^/]+.*$')",
            "checkpoint.endpointURL: write http://host:port or https://host:port",
        ),
        (
            "self.uri == oldSelf.uri",
            "checkpoint.uri can't change while a job exists: its commits are there; make a new job",
        ),
    )
    uri: Annotated[str, Field(min_length=1, max_length=1024)]
    interval: Annotated[str, Field(pattern=INTERVAL_PATTERN, max_length=16)] = "auto"
    keep: Annotated[int, Field(ge=1, le=1000)] = 2
    keep_every: Annotated[int | None, Field(ge=1, description="Steps: of so many, one commit is kept.")] = None
    on_notice: OnNotice = OnNotice.IMMEDIATE
    peer_replicas: Annotated[
        int,
        Field(
            ge=0,
            le=1,
            description="1: each member's newest shard is in another member's memory too, so that a node lost "
            "without notice costs the steps since then alone, one or two with peerInterval 1. Needs memory for about "
            "seven times a node's shard.",
        ),
    ] = 0
    peer_interval: Annotated[
        int | None,
        Field(ge=1, description="Steps from one replica to the next; default: as few as cost a step at most 2%."),
    ] = None
    endpoint_url: Annotated[str | None, Field(alias="endpointURL", max_length=1024)] = None


class LossSpike(Resource):
    """A step whose loss is more than `factor` times the median of the `window` good steps before it."""

    factor: Annotated[float, Field(ge=1)]
    window: Annotated[int, Field(ge=1, le=10_000)] = 50
    action: StabilityAction = StabilityAction.ROLLBACK


class Stability(Resource):
    """What to do about a step that would spoil the model: `fail` ends the job, `skip` makes no update, `rollback`
    undoes everything since the newest commit. Training goes on with the next samples.

    `nonFinite` is for losses and gradients that are not finite. A run that has to be rolled back to the same commit
    more than `maxRollbacks` times fails. Without `stability` steps are not judged.
    """

    non_finite: StabilityAction = StabilityAction.FAIL
    loss_spike: LossSpike | None = None
    max_rollbacks: Annotated[int, Field(ge=1, le=1000)] = 3


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
