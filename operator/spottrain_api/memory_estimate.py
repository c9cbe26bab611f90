"""Memory that a training step needs on each accelerator, by strategy, and the strategy to choose.

Pure arithmetic from what is known before a run; sizes are in bytes. Weights, gradients and optimizer state are
counted as the trainer's engines keep them. Activations are those of a transformer with fused attention (Korthikanti
et al. 2022, "Reducing Activation Recomputation in Large Transformer Models", table 2) and the logits over its
vocabulary.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from .contract import Precision, Strategy

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
# Share of an accelerator's memory to plan with. Fragmentation takes the rest.
USABLE = 0.92
# Share of the memory that is left to activations if the sequence length isn't known.
UNKNOWN_ACTIVATIONS = 0.3
# Elements; DeepSpeed's defaults of reduce_bucket_size and stage3_max_live_parameters.
_BUCKET = 500_000_000
_LIVE = 1_000_000_000


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelFacts:
    """Size of a model. `num_trained` None: all parameters are trained. `hidden` (units) and `layers` None: those of a
    transformer of usual proportions. `vocabulary` 0: its logits are not counted."""

    num_parameters: int
    num_trained: int | None = None
    hidden: int | None = None
    layers: int | None = None
    vocabulary: int = 0

    def __post_init__(self) -> None:
        if self.num_parameters < 1:
            raise ValueError("the number of parameters has to be at least 1")

    @property
    def trained(self) -> int:
        return self.num_parameters if self.num_trained is None else self.num_trained

    def proportions(self) -> tuple[int, int]:
        """Hidden units and layers. Unknown ones make 12 * layers * hidden^2 the number of parameters."""
        if self.hidden is not None and self.layers is not None:
            return self.hidden, self.layers
        if self.layers is not None:
            return max(1, math.isqrt(self.num_parameters // (12 * self.layers))), self.layers
        hidden = self.hidden or max(1, round((self.num_parameters * _HIDDEN_PER_LAYER / 12) ** (1 / 3)))
        return hidden, max(1, round(self.num_parameters / (12 * hidden * hidden)))


@dataclass(frozen=True, slots=True, kw_only=True)
class Workload:
    """What is trained, and how.

    - micro_batch: samples that a rank computes at once.
    - world_size: the smallest that the job may run with, as the strategy has to fit there.
    - sequence_length: tokens in a sample. None: activations are not estimated.
    - optimizer_slots: fp32 values that the optimizer keeps for each parameter; 2 for Adam.
    - fsdp_ranks: number of ranks over which FSDP2 shards. None: all.
    - zero_bucket, zero_live: reduce_bucket_size and stage3_max_live_parameters of a DeepSpeed JSON, in elements.
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
    zero_bucket: int | None = None
    zero_live: int | None = None

    def __post_init__(self) -> None:
        if self.precision not in _COMPUTE_BYTES:
            raise ValueError(f"precision {self.precision!r} is unknown; use one of {', '.join(_COMPUTE_BYTES)}")
        if min(self.micro_batch, self.world_size, self.sequence_length or 1) < 1:
            raise ValueError("batch.micro, the world size and the sequence length have to be at least 1")

    @property
    def compute_bytes(self) -> int:
        return _COMPUTE_BYTES[self.precision]


@dataclass(frozen=True, slots=True, kw_only=True)
class Memory:
    """Memory of a machine for each rank, in bytes. `host_bytes` None: enough. `offloads` False: there is no other
    memory to offload to, for example because the ranks compute on the CPU."""

    accelerator_bytes: int
    host_bytes: int | None = None
    offloads: bool = True


@dataclass(frozen=True, slots=True, kw_only=True)
class Estimate:
    """Memory of one rank under one strategy.

    Weights, gradients and optimizer state are always there. `activations` and `buffers` (gathered or cast
    parameters, buckets) exist in forward and backward, `update` (temporaries) in the optimizer's step. `host` is in
    the node's memory.
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
    host: int = 0

    @property
    def working(self) -> int:
        """Peak of what comes and goes within a step, without activations."""
        return max(self.buffers, self.update - self.activations)

    @property
    def total(self) -> int:
        """Bytes on the accelerator at the peak."""
        kept = self.parameters + self.gradients + self.optimizer
        return kept + self.activations + self.working + RUNTIME_BYTES

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
    """The strategy to use, whether it fits, and why it was chosen."""

    estimate: Estimate
    fits: bool
    reason: str


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


def usable_bytes(workload: Workload, memory: Memory) -> int:
    """Bytes of an accelerator that an estimate may take."""
    unknown = UNKNOWN_ACTIVATIONS if workload.sequence_length is None else 0.0
    return int(memory.accelerator_bytes * USABLE * (1 - unknown))


def fits(estimate: Estimate, workload: Workload, memory: Memory) -> bool:
    """Whether the estimate fits into the accelerator's memory and the host's."""
    if estimate.offload_optimizer and not memory.offloads:
        return False
    enough_host = memory.host_bytes is None or estimate.host <= memory.host_bytes
    return estimate.total <= usable_bytes(workload, memory) and enough_host


def choose_strategy(
    workload: Workload, memory: Memory, *, allowed: Callable[[Estimate], bool] = lambda estimate: True
) -> Choice:
    """The first strategy that is allowed and fits; if none fits, the one that needs least."""
    candidates = [e for e in estimates(workload) if allowed(e) and (memory.offloads or not e.offload_optimizer)]
    fitting = next((e for e in candidates if fits(e, workload, memory)), None)
    chosen = fitting or min(candidates, key=lambda e: e.total)
    reason = _reason(workload, chosen, candidates, memory, fits=fitting is not None)
    return Choice(estimate=chosen, fits=fitting is not None, reason=reason)


def in_gib(num_bytes: int) -> str:
    """The size for people: 79.2 GiB."""
    return f"{num_bytes / GIB:,.1f} GiB" if num_bytes >= GIB / 10 else f"{num_bytes / (1 << 20):,.0f} MiB"


def _reason(
    workload: Workload, chosen: Estimate, candidates: Iterable[Estimate], memory: Memory, *, fits: bool
) -> str:
    ranks = f"{workload.world_size} ranks" if workload.world_size > 1 else "1 rank"
    model = f"{_in_words(workload.model.num_parameters)} parameters on {ranks}"
    room = usable_bytes(workload, memory)
    place = "an accelerator's" if memory.offloads else "a rank's share of the node's"
    limit = f"{in_gib(room)} of {place} {in_gib(memory.accelerator_bytes)}"
    if workload.sequence_length is None:
        limit += " (the rest is left to activations, as the number of tokens in a sample is not known)"
    if not fits and chosen.total <= room and memory.host_bytes is not None:
        return (
            f"Nothing fits: {model} leave {in_gib(chosen.host)} each on the CPU, with {chosen.name}, and a rank's "
            f"share of the node's memory is {in_gib(memory.host_bytes)}. Raise nodes.min, or use nodes with more "
            "memory."
        )
    if not fits:
        return (
            f"Nothing fits: {model} need at least {in_gib(chosen.total)} each, with {chosen.name}, and there are "
            f"{limit}. {_remedy(workload, chosen)}, or use accelerators with more memory."
        )
    before = next((e for e in candidates if e.total > room), None)
    others = f"; {before.name} would need {in_gib(before.total)}" if before and chosen.strategy != DDP else ""
    return f"{model} need about {in_gib(chosen.total)} each with {chosen.name}, of {limit}{others}."


def _remedy(workload: Workload, estimate: Estimate) -> str:
    if estimate.activations < estimate.total / 2:
        return "Raise nodes.min"
    checkpointing = "" if workload.activation_checkpointing else ", set activationCheckpointing"
    return f"Most of it are activations: lower batch.micro{checkpointing}"


def _in_words(num: int) -> str:
    units = ((10**9, "billion"), (10**6, "million"), (1000, "thousand"))
    return next((f"{num / unit:.3g} {word}" for unit, word in units if num >= unit), str(num))


def _ddp(workload: Workload) -> Estimate:
    num, trained = workload.model.num_parameters, workload.model.trained
    return Estimate(
        strategy=DDP,
        parameters=_FP32 * num,
        gradients=_FP32 * trained,
        optimizer=_FP32 * workload.optimizer_slots * trained,
        activations=_activations(workload),
        # Autocast keeps the cast weights until the end of forward.
        buffers=0 if workload.precision == "fp32" else workload.compute_bytes * num,
        update=_FP32 * trained,
    )


def _fsdp(workload: Workload, *, offload: bool = False) -> Estimate:
    compute = workload.compute_bytes
    num_shards = workload.fsdp_ranks or workload.world_size
    shard, trained = _shards(workload, num_shards)
    _, layers = workload.model.proportions()
    block = workload.model.num_parameters // layers
    # Two gathered blocks, as the next one is prefetched, and one block's gradients, in fp32 and as computed.
    gathered = block * (2 * compute + compute + _FP32) if num_shards > 1 else block * compute
    kept = (_FP32 * shard, _FP32 * trained, _FP32 * workload.optimizer_slots * trained)
    parameters, gradients, optimizer = (0, 0, 0) if offload else kept
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
        host=sum(kept) if offload else 0,
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
    host = 0
    if offload_optimizer:
        host, optimizer, gradients = optimizer + gradients, 0, 0
    if offload_parameters:
        host, parameters = host + parameters, 0
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
        host=host,
    )


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
