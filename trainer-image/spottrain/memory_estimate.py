"""How much memory a training step needs on each accelerator, by strategy, and which strategy that speaks for.

Pure arithmetic from what is known before a run. Weights, gradients and optimizer state are counted as the
engines of this package keep them. Activations are those of a transformer of usual proportions with fused
attention, after Korthikanti et al. 2022, "Reducing Activation Recomputation in Large Transformer Models",
table 2: 34 bytes for each token, layer and hidden unit in 16 bits. Sizes are in bytes.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

GB = 1e9
_FP32 = 4
_COMPUTE_BYTES = {"fp32": 4, "bf16": 2}
# Hidden units for each layer: 64 (GPT-2) to 128 (7B models).
_HIDDEN_PER_LAYER = 100
_ACTIVATION_BYTES_PER_UNIT = 34
# CUDA's context, NCCL's buffers, kernels.
RUNTIME_BYTES = int(1.5 * GB)
# Part of an accelerator's memory that is planned with; the allocator's fragments take the rest.
USABLE = 0.92
# Part of the memory that is left to activations where the sequence length isn't known.
UNKNOWN_ACTIVATIONS = 0.3
# Elements; DeepSpeed's defaults of reduce_bucket_size and stage3_max_live_parameters.
_BUCKET = 500_000_000
_LIVE = 1_000_000_000


@dataclass(frozen=True, slots=True, kw_only=True)
class Workload:
    """What is trained. `world_size` is the smallest that the job may run with, as the strategy has to fit there.

    `sequence_length` (tokens a sample) None: activations are not estimated. `optimizer_slots` is the number of
    fp32 values that the optimizer keeps for each parameter: 2 for Adam.
    """

    num_parameters: int
    micro_batch: int
    world_size: int
    precision: str = "bf16"
    sequence_length: int | None = None
    activation_checkpointing: bool = False
    optimizer_slots: int = 2

    def __post_init__(self) -> None:
        if self.precision not in _COMPUTE_BYTES:
            raise ValueError(f"precision {self.precision!r} is unknown; use one of {', '.join(_COMPUTE_BYTES)}")
        if min(self.num_parameters, self.micro_batch, self.world_size) < 1:
            raise ValueError("the number of parameters, batch.micro and the world size have to be at least 1")


@dataclass(frozen=True, slots=True, kw_only=True)
class Estimate:
    """Memory of one rank under one strategy. `working` is what comes and goes within a step: gathered
    parameters, buckets and the optimizer's temporaries. `host` is in the node's memory."""

    strategy: str
    zero_stage: int | None = None
    offload_optimizer: bool = False
    offload_parameters: bool = False
    parameters: int
    gradients: int
    optimizer: int
    working: int
    activations: int
    host: int = 0

    @property
    def total(self) -> int:
        """Of the accelerator."""
        return self.parameters + self.gradients + self.optimizer + self.working + self.activations + RUNTIME_BYTES

    @property
    def name(self) -> str:
        stage = f" ZeRO {self.zero_stage}" if self.zero_stage is not None else ""
        offloaded = [
            word
            for word, is_offloaded in (("optimizer", self.offload_optimizer), ("parameters", self.offload_parameters))
            if is_offloaded
        ]
        return self.strategy + stage + (f", {' and '.join(offloaded)} on the CPU" if offloaded else "")


@dataclass(frozen=True, slots=True, kw_only=True)
class Choice:
    """The strategy to use, why, and what was compared."""

    strategy: str
    zero_stage: int | None
    offload_optimizer: bool
    offload_parameters: bool
    fits: bool
    reason: str
    table: tuple[Estimate, ...]


def estimates(workload: Workload) -> tuple[Estimate, ...]:
    """Every strategy, in order of preference: the first that fits is the one to use."""
    return (
        _ddp(workload),
        _fsdp(workload),
        *(_zero(workload, stage) for stage in (1, 2, 3)),
        _zero(workload, 2, offload_optimizer=True),
        _zero(workload, 3, offload_optimizer=True),
        _zero(workload, 3, offload_optimizer=True, offload_parameters=True),
    )


def choose_strategy(
    workload: Workload,
    *,
    accelerator_bytes: int,
    host_bytes_per_rank: int | None = None,
    has_deepspeed: bool = True,
) -> Choice:
    """The first strategy that fits an accelerator, and the one that needs least where none does.

    DDP needs the least communication; FSDP2 shards everything and needs no further package; ZeRO comes with
    offload to the CPU, which is slow, so last. `host_bytes_per_rank` None: the host's memory is enough.
    """
    table = estimates(workload)
    usable = int(accelerator_bytes * USABLE)
    room = usable if workload.sequence_length is not None else int(usable * (1 - UNKNOWN_ACTIVATIONS))

    def fits(estimate: Estimate) -> bool:
        return estimate.total <= room and (host_bytes_per_rank is None or estimate.host <= host_bytes_per_rank)

    candidates = [e for e in table if has_deepspeed or e.strategy != "deepspeed"]
    best = next((e for e in candidates if fits(e)), None)
    chosen = best or min(candidates, key=lambda e: e.total)
    return Choice(
        strategy=chosen.strategy,
        zero_stage=chosen.zero_stage,
        offload_optimizer=chosen.offload_optimizer,
        offload_parameters=chosen.offload_parameters,
        fits=best is not None,
        reason=_reason(workload, chosen, candidates, accelerator_bytes, room, fits=best is not None),
        table=table,
    )


def _reason(
    workload: Workload, chosen: Estimate, candidates: Iterable[Estimate], memory: int, room: int, *, fits: bool
) -> str:
    model = f"{workload.num_parameters / 1e9:.3g} billion parameters on {workload.world_size} ranks"
    limit = f"{room / GB:.1f} GB of an accelerator's {memory / GB:.1f} GB"
    if workload.sequence_length is None:
        limit += " (the rest is left to activations, as the sequence length is not known)"
    if not fits:
        return (
            f"Nothing fits: {model} need at least {chosen.total / GB:.1f} GB each, with {chosen.name}, and there are "
            f"{limit}. Raise nodes.min, lower batch.micro, or use accelerators with more memory."
        )
    before = next((e for e in candidates if e.total > room), None)
    others = f"; {before.name} would need {before.total / GB:.1f} GB" if before and chosen.strategy != "ddp" else ""
    return f"{model} need about {chosen.total / GB:.1f} GB each with {chosen.name}, of {limit}{others}."


def _ddp(workload: Workload) -> Estimate:
    num = workload.num_parameters
    # Autocast keeps the weights that it has cast until the end of forward.
    cast = num * _COMPUTE_BYTES[workload.precision] if workload.precision != "fp32" else 0
    return Estimate(
        strategy="ddp",
        parameters=_FP32 * num,
        gradients=_FP32 * num,
        optimizer=_FP32 * workload.optimizer_slots * num,
        # The optimizer's step and the cast weights are not there at the same time.
        working=max(cast, _FP32 * num),
        activations=_activations(workload),
    )


def _fsdp(workload: Workload) -> Estimate:
    num, compute = workload.num_parameters, _COMPUTE_BYTES[workload.precision]
    shard = -(-num // workload.world_size)
    _, layers = _proportions(num)
    block = num // layers
    # Two blocks are gathered, as the next is fetched meanwhile, and one block's gradients in fp32 and as computed.
    gathered = block * (2 * compute + compute + _FP32) if workload.world_size > 1 else block * compute
    return Estimate(
        strategy="fsdp",
        parameters=_FP32 * shard,
        gradients=_FP32 * shard,
        optimizer=_FP32 * workload.optimizer_slots * shard,
        working=max(gathered, _FP32 * shard),
        activations=_activations(workload),
    )


def _zero(
    workload: Workload, stage: int, *, offload_optimizer: bool = False, offload_parameters: bool = False
) -> Estimate:
    num, compute = workload.num_parameters, _COMPUTE_BYTES[workload.precision]
    shard = -(-num // workload.world_size)
    parameters = compute * (shard if stage == 3 else num)
    gradients = _FP32 * (num if stage == 1 else shard)
    optimizer = _FP32 * (1 + workload.optimizer_slots) * shard  # master weights and the optimizer's own
    bucket = min(num, _BUCKET) * _FP32
    live = min(num, _LIVE) * compute if stage == 3 else 0
    # Gradients as they are computed come before they are added up in fp32; the step itself comes later.
    computed = compute * num if stage == 1 else 0
    step = 0 if offload_optimizer else 2 * _FP32 * shard
    host = 0
    if offload_optimizer:
        host, optimizer, gradients = optimizer + gradients, 0, 0
    if offload_parameters:
        host, parameters = host + parameters, 0
    return Estimate(
        strategy="deepspeed",
        zero_stage=stage,
        offload_optimizer=offload_optimizer,
        offload_parameters=offload_parameters,
        parameters=parameters,
        gradients=gradients,
        optimizer=optimizer,
        working=max(bucket + live + computed, step),
        activations=_activations(workload),
        host=host,
    )


def _activations(workload: Workload) -> int:
    if workload.sequence_length is None:
        return 0
    hidden, layers = _proportions(workload.num_parameters)
    tokens = workload.micro_batch * workload.sequence_length
    width = _COMPUTE_BYTES[workload.precision] / _COMPUTE_BYTES["bf16"]
    layer = tokens * hidden * _ACTIVATION_BYTES_PER_UNIT * width
    if workload.activation_checkpointing:  # the input of every layer, and one layer computed again
        return int(tokens * hidden * layers * 2 * width + layer)
    return int(layer * layers)


def _proportions(num_parameters: int) -> tuple[int, int]:
    """Hidden units and layers of a transformer of 12 * layers * hidden^2 parameters."""
    hidden = max(1, round((num_parameters * _HIDDEN_PER_LAYER / 12) ** (1 / 3)))
    return hidden, max(1, round(hidden / _HIDDEN_PER_LAYER))
