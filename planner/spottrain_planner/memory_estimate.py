"""Memory that a training run needs, by strategy.

It is estimated for each accelerator and for the host. The estimate is pure arithmetic from what is known before a
run; sizes are in bytes. Weights, gradients and optimizer state are counted as the trainer's engines keep them, and so
is the start, when each rank builds the whole model and spreads it. Activations are those of a transformer with fused
attention (Korthikanti et al. 2022, "Reducing Activation Recomputation in Large Transformer Models", table 2) and the
logits over its vocabulary.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from spottrain_api.settings.choices import Precision, Strategy
from spottrain_planner import batch_sizes

GIB = 1 << 30
DDP, FSDP, DEEPSPEED = Strategy.DDP.value, Strategy.FSDP.value, Strategy.DEEPSPEED.value
_FP32 = 4
_COMPUTE_BYTES: dict[str, int] = {Precision.FP32: 4, Precision.BF16: 2, Precision.FP16: 2}
# Hidden units for each layer: 64 (GPT-2) to 128 (7B models).
_HIDDEN_PER_LAYER = 100
# For each token, layer and hidden unit; values of the compute precision.
_VALUES_PER_UNIT = 17
# Logits in fp32, their logarithms of probabilities, and the gradient of the latter.
_BYTES_PER_LOGIT = 3 * _FP32
# CUDA's context, NCCL's buffers, kernels.
RUNTIME_BYTES = int(1.5 * GIB)
# If a rank's share of a checkpoint doesn't fit into the node's memory, it is staged in pieces of so many bytes.
PIECE_BYTES = 128 << 20
# Elements; DeepSpeed's defaults of reduce_bucket_size and stage3_max_live_parameters.
_BUCKET = 500_000_000
_LIVE = 1_000_000_000


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelFacts:
    """Size of a model.

    Attributes:
        num_trained: Trained parameters. None: all of them.
        hidden, layers: Hidden units and layers. None: those of a transformer of usual proportions.
        vocabulary: Its size. 0: its logits are not counted.
        built_bytes: Size of the model as the script builds it, whole on every rank. None: in fp32.
        frozen_bytes: Size of what is not trained, which keeps its type, such as a base in bf16 or in 4 bits. None: in
            fp32.
    """

    num_parameters: int
    num_trained: int | None = None
    hidden: int | None = None
    layers: int | None = None
    vocabulary: int = 0
    built_bytes: int | None = None
    frozen_bytes: int | None = None

    def __post_init__(self) -> None:
        if self.num_parameters < 1:
            raise ValueError("the number of parameters must be at least 1")

    @property
    def trained(self) -> int:
        return self.num_parameters if self.num_trained is None else self.num_trained

    @property
    def built(self) -> int:
        return _FP32 * self.num_parameters if self.built_bytes is None else self.built_bytes

    @property
    def kept(self) -> int:
        """Bytes of the weights as DDP and FSDP2 keep them: what is trained in fp32."""
        frozen = _FP32 * (self.num_parameters - self.trained) if self.frozen_bytes is None else self.frozen_bytes
        return _FP32 * self.trained + frozen

    @property
    def largest_piece(self) -> int:
        """Number of parameters in the largest piece that reaches the device unsharded.

        FSDP2 and ZeRO 3 move a piece to the device before they shard it. A piece is a block, or what is in no block,
        such as the embedding and the head.
        """
        hidden, layers = self.proportions()
        return max(self.num_parameters // layers, min(self.num_parameters, 2 * self.vocabulary * hidden))

    def proportions(self) -> tuple[int, int]:
        """Hidden units and layers.

        Unknown ones make 12 * layers * hidden^2 the number of parameters.
        """
        if self.hidden is not None and self.layers is not None:
            return self.hidden, self.layers
        if self.layers is not None:
            return max(1, math.isqrt(self.num_parameters // (12 * self.layers))), self.layers
        hidden = self.hidden or max(1, round((self.num_parameters * _HIDDEN_PER_LAYER / 12) ** (1 / 3)))
        return hidden, max(1, round(self.num_parameters / (12 * hidden * hidden)))


@dataclass(frozen=True, slots=True, kw_only=True)
class Workload:
    """What is trained, and how.

    Attributes:
        micro_batch: Samples that a rank computes at once.
        world_size: The smallest that the job may run with, as the strategy has to fit there.
        sequence_length: Tokens in a sample. None: activations are not estimated.
        optimizer_slots: Fp32 values that the optimizer keeps for each parameter; 2 for Adam.
        fsdp_ranks: Number of ranks over which FSDP2 shards; the other ranks are replicas. None: all.
        fsdp_keeps_gathered: Whether FSDP2 keeps gathered parameters from forward to backward.
        global_batch: Samples of a step. None: those of one micro-batch of every rank.
        multiple_of: A number of which the samples of a micro-batch are a multiple.
        built_in_place: Whether the model is built in the memory that it is trained in, as on ranks that compute on
            the CPU, and not on the host.
        zero_bucket, zero_live: Reduce_bucket_size and stage3_max_live_parameters of a DeepSpeed JSON, in elements.
            None: the JSON doesn't set them.
    """

    model: ModelFacts
    micro_batch: int
    world_size: int
    precision: str = "bf16"
    sequence_length: int | None = None
    activation_checkpointing: bool = False
    optimizer_slots: int = 2
    fsdp_ranks: int | None = None
    fsdp_keeps_gathered: bool = False
    global_batch: int | None = None
    multiple_of: int = 1
    built_in_place: bool = False
    zero_bucket: int | None = None
    zero_live: int | None = None

    def __post_init__(self) -> None:
        if self.precision not in _COMPUTE_BYTES:
            raise ValueError(f"precision {self.precision!r} is unknown; use one of {', '.join(_COMPUTE_BYTES)}")
        if min(self.micro_batch, self.world_size, self.sequence_length or 1) < 1:
            raise ValueError("batch.micro, the world size and the sequence length must be at least 1")

    @property
    def compute_bytes(self) -> int:
        return _COMPUTE_BYTES[self.precision]

    @property
    def num_micro_batches(self) -> int:
        """Micro-batches that a rank computes in a step, at most."""
        return batch_sizes.num_micro_batches(
            self.global_batch or self.multiple_of, self.micro_batch, self.world_size, self.multiple_of
        )

    @property
    def accumulates_for_replicas(self) -> bool:
        """Whether FSDP2 adds up shards of gradients on the device, also with offload.

        Under hybrid sharding on several nodes it keeps them until the replicas reduce them. A job that starts on one
        node may grow, so the estimate always counts them.
        """
        return self.fsdp_ranks is not None and self.num_micro_batches > 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Estimate:
    """Memory of one rank under one strategy.

    Weights, gradients and optimizer state are always there.

    Attributes:
        activations, buffers: What forward and backward add: activations, and gathered or cast parameters and buckets.
        update: Temporaries of the optimizer's step.
        start: The peak while the model is spread.
        host_start: The peak in the node's memory while the model is spread: as a whole, unless it is built in place.
        offloaded: What is kept in the node's memory for the accelerator.
        staging: The rank's share of a checkpoint, which stays in the node's memory from the first one on.
    """

    strategy: str
    zero_stage: int | None = None
    offload_optimizer: bool = False
    offload_parameters: bool = False
    parameters: int
    gradients: int
    optimizer: int
    activations: int
    buffers: int
    update: int
    start: int
    host_start: int
    offloaded: int = 0
    staging: int

    @property
    def working(self) -> int:
        """Peak of what comes and goes within a step, without activations."""
        return max(self.buffers, self.update - self.activations)

    @property
    def step(self) -> int:
        """Bytes on the accelerator at the peak of a step, without the runtime."""
        return self.parameters + self.gradients + self.optimizer + self.activations + self.working

    @property
    def total(self) -> int:
        """Bytes on the accelerator at the peak of the run."""
        return max(self.step, self.start) + RUNTIME_BYTES

    @property
    def host(self) -> int:
        """Bytes of the node's memory at the peak of the run, with the rank's share of a checkpoint."""
        return max(self.host_start, self.offloaded + self.staging)

    @property
    def host_in_pieces(self) -> int:
        """As `host`, with checkpoints that are staged in pieces."""
        return max(self.host_start, self.offloaded + min(self.staging, PIECE_BYTES))

    @property
    def name(self) -> str:
        stage = f" ZeRO {self.zero_stage}" if self.zero_stage is not None else ""
        offloaded = [
            word
            for word, is_offloaded in (("optimizer", self.offload_optimizer), ("parameters", self.offload_parameters))
            if is_offloaded
        ]
        return self.strategy + stage + (f", {' and '.join(offloaded)} on the CPU" if offloaded else "")


def estimates(workload: Workload) -> tuple[Estimate, ...]:
    """Every strategy, in order of preference: the first that fits is the one to use.

    DDP needs the least communication. FSDP2 shards everything and needs no further package. Offloading to the CPU
    is slow and comes last.
    """
    return (
        _ddp(workload),
        _fsdp(workload),
        *(_zero(workload, stage) for stage in (1, 2, 3)),
        _zero(workload, 2, offload_optimizer=True),
        _zero(workload, 3, offload_optimizer=True),
        _fsdp(workload, offload=True),
        _zero(workload, 3, offload_optimizer=True, offload_parameters=True),
    )


def in_gib(num_bytes: int) -> str:
    """The size for people: 79.2 GiB."""
    return f"{num_bytes / GIB:,.1f} GiB" if num_bytes >= GIB / 10 else f"{num_bytes / (1 << 20):,.0f} MiB"


def _ddp(workload: Workload) -> Estimate:
    num, trained = workload.model.num_parameters, workload.model.trained
    return Estimate(
        strategy=DDP,
        parameters=workload.model.kept,
        gradients=_FP32 * trained,
        optimizer=_FP32 * workload.optimizer_slots * trained,
        activations=_activations(workload),
        # Autocast keeps the cast weights until the end of forward.
        buffers=0 if workload.precision == "fp32" else workload.compute_bytes * num,
        update=_FP32 * trained,
        start=workload.model.kept + _FP32 * trained,  # DDP makes its buckets at once
        host_start=_built_on_host(workload),
        staging=_staging(workload),
    )


def _fsdp(workload: Workload, *, offload: bool = False) -> Estimate:
    compute = workload.compute_bytes
    num_shards = workload.fsdp_ranks or workload.world_size
    _, trained = _shards(workload, num_shards)
    _, layers = workload.model.proportions()
    block = workload.model.num_parameters // layers
    # The whole model stays gathered, or two blocks are, as the next one is prefetched. One block's gradients exist in
    # fp32 and as computed.
    together = workload.model.num_parameters if workload.fsdp_keeps_gathered else block * min(num_shards, 2)
    gathered = together * compute + (block * (compute + _FP32) if num_shards > 1 else 0)
    kept = (-(-workload.model.kept // num_shards), _FP32 * trained, _FP32 * workload.optimizer_slots * trained)
    parameters, gradients, optimizer = kept
    if offload:
        parameters, gradients, optimizer = 0, gradients if workload.accumulates_for_replicas else 0, 0
    piece = workload.model.largest_piece
    piece_shard = -(-piece // num_shards)
    return Estimate(
        strategy=FSDP,
        offload_optimizer=offload,
        offload_parameters=offload,
        parameters=parameters,
        gradients=gradients,
        optimizer=optimizer,
        activations=_activations(workload),
        buffers=gathered,
        update=0 if offload else _FP32 * trained,
        # Piece by piece: the sharded ones, and one whole piece. In place, the reverse.
        start=_built(workload) + _FP32 * piece_shard if workload.built_in_place else parameters + _FP32 * piece,
        host_start=_built_on_host(workload),
        offloaded=sum(kept) if offload else 0,
        staging=_staging(workload),
    )


def _zero(
    workload: Workload, stage: int, *, offload_optimizer: bool = False, offload_parameters: bool = False
) -> Estimate:
    num, compute = workload.model.num_parameters, workload.compute_bytes
    shard, trained = _shards(workload, workload.world_size)
    parameters = compute * (shard if stage == 3 else num)
    gradients = _FP32 * (workload.model.trained if stage == 1 else trained)
    optimizer = _FP32 * (1 + workload.optimizer_slots) * trained  # master weights and the optimizer's own
    # Stages 2 and 3 flatten the bucket before the ranks reduce it: twice in fp32, or as computed, again, and in fp32.
    # The trainer makes the bucket no larger than the model. A size that the user sets is kept for any model.
    elements = min(workload.model.trained, _BUCKET) if workload.zero_bucket is None else workload.zero_bucket
    bucket = elements * _FP32 * (1 if stage == 1 else 2)
    # Prefetched parameters (stage3_prefetch_bucket_size) count as live; allgather_bucket_size takes no memory itself.
    live = min(num, _LIVE if workload.zero_live is None else workload.zero_live) * compute if stage == 3 else 0
    # Gradients exist as computed before they are added up in fp32.
    computed = compute * workload.model.trained if stage == 1 else 0
    kept = 0
    if offload_optimizer:
        kept, optimizer, gradients = optimizer + gradients, 0, 0
    if offload_parameters:
        kept, parameters = kept + parameters, 0
    # Stage 3 partitions one parameter after the other. Below, the whole model is flattened: a copy, which DeepSpeed
    # makes on the host if the accelerator has no room for it.
    piece, flattened = (compute * workload.model.largest_piece, 0) if stage == 3 else (0, 2 * compute * num)
    start = max(_built(workload) + piece, flattened) if workload.built_in_place else parameters + piece
    return Estimate(
        strategy=DEEPSPEED,
        zero_stage=stage,
        offload_optimizer=offload_optimizer,
        offload_parameters=offload_parameters,
        parameters=parameters,
        gradients=gradients,
        optimizer=optimizer,
        activations=_activations(workload),
        buffers=bucket + live + computed,
        update=0 if offload_optimizer else 2 * _FP32 * trained,
        start=start,
        host_start=max(_built_on_host(workload), flattened),
        offloaded=kept,
        staging=_staging(workload),
    )


def _built(workload: Workload) -> int:
    """Bytes that the model takes on the accelerator before it is spread."""
    return workload.model.built if workload.built_in_place else 0


def _staging(workload: Workload) -> int:
    """Bytes of a rank's share of a checkpoint: each value of weights and optimizer is written once, by one rank."""
    optimizer = _FP32 * workload.optimizer_slots * workload.model.trained
    return -(-(workload.model.kept + optimizer) // workload.world_size)


def _built_on_host(workload: Workload) -> int:
    """Bytes that the model takes in the host's memory before it is spread."""
    return 0 if workload.built_in_place else workload.model.built


def _shards(workload: Workload, number: int) -> tuple[int, int]:
    """Number of a rank's parameters, and of those that are trained."""
    return -(-workload.model.num_parameters // number), -(-workload.model.trained // number)


def _activations(workload: Workload) -> int:
    if workload.sequence_length is None:
        return 0
    hidden, layers = workload.model.proportions()
    tokens = workload.micro_batch * workload.sequence_length
    unit = tokens * hidden * workload.compute_bytes
    logits = tokens * workload.model.vocabulary * _BYTES_PER_LOGIT
    if workload.activation_checkpointing:  # the input of every layer, and one layer computed again
        return unit * layers + max(unit * _VALUES_PER_UNIT, logits)
    return unit * _VALUES_PER_UNIT * layers + logits
