"""Chooses the strategy that fits into a machine's memory, and explains why.

Sizes are in bytes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass

from spottrain_planner.memory_estimate import DDP, PIECE_BYTES, RUNTIME_BYTES, Estimate, Workload, estimates, in_gib
from spottrain_runtime.wording import counted

# Share of an accelerator's memory to plan with. The allocator's fragments take the rest.
USABLE = 0.92
# Share of the memory that is left to activations if the sequence length isn't known.
UNKNOWN_ACTIVATIONS = 0.3


@dataclass(frozen=True, slots=True, kw_only=True)
class Memory:
    """Memory that a machine has for each rank.

    Attributes:
        host_bytes: None if it is enough.
        offloads: False if there is no other memory to offload to, because the ranks compute on the CPU.
    """

    accelerator_bytes: int
    host_bytes: int | None = None
    offloads: bool = True


@dataclass(frozen=True, slots=True, kw_only=True)
class Choice:
    """The strategy to use, and why.

    It says whether the strategy fits, and what would help if it doesn't.
    """

    estimate: Estimate
    fits: bool
    reason: str
    remedy: str = ""


def usable_share(workload: Workload) -> float:
    """Share of an accelerator's memory that an estimate may take."""
    unknown = UNKNOWN_ACTIVATIONS if workload.sequence_length is None else 0.0
    return USABLE * (1 - unknown)


def usable_bytes(workload: Workload, memory: Memory) -> int:
    """Bytes of an accelerator that an estimate may take."""
    return int(memory.accelerator_bytes * usable_share(workload))


def fits(estimate: Estimate, workload: Workload, memory: Memory) -> bool:
    """Whether the estimate fits, on the accelerator and on the host."""
    if estimate.offload_optimizer and not memory.offloads:
        return False
    room = usable_bytes(workload, memory)
    return peak(estimate, workload, memory) <= room and _fits_host(estimate, workload, memory)


def peak(estimate: Estimate, workload: Workload, memory: Memory) -> int:
    """Bytes at the peak of the run. Ranks that compute on the CPU stage checkpoints in the same memory."""
    if memory.offloads:
        return estimate.total
    staged = min(estimate.staging, PIECE_BYTES) if in_pieces(estimate, workload, memory) else estimate.staging
    return _peak_on_cpu(estimate, staged)


def host_needed(estimate: Estimate, workload: Workload, memory: Memory) -> int:
    """Bytes of the node's memory at the peak of the run."""
    return estimate.host_in_pieces if in_pieces(estimate, workload, memory) else estimate.host


def in_pieces(estimate: Estimate, workload: Workload, memory: Memory) -> bool:
    """Whether checkpoints are staged in pieces, because there is no room for the rank's whole share of one."""
    if not memory.offloads:
        return _peak_on_cpu(estimate, estimate.staging) > usable_bytes(workload, memory)
    return memory.host_bytes is not None and estimate.host > memory.host_bytes


def _peak_on_cpu(estimate: Estimate, staged: int) -> int:
    return max(estimate.step + staged, estimate.start) + RUNTIME_BYTES


def _fits_host(estimate: Estimate, workload: Workload, memory: Memory) -> bool:
    return memory.host_bytes is None or host_needed(estimate, workload, memory) <= memory.host_bytes


def choose_strategy(
    workload: Workload, memory: Memory, *, allowed: Callable[[Estimate], bool] = lambda estimate: True
) -> Choice:
    """The first strategy that is allowed and fits.

    If none fits, the one that lacks least. If only the host is too small, this is the one that needs least of the
    host among those that fit the accelerator.
    """
    candidates = [e for e in estimates(workload) if allowed(e) and (memory.offloads or not e.offload_optimizer)]
    fitting = next((e for e in candidates if fits(e, workload, memory)), None)
    if fitting is not None:
        return Choice(estimate=fitting, fits=True, reason=_reason(workload, fitting, candidates, memory))
    room = usable_bytes(workload, memory)
    on_accelerator = [e for e in candidates if peak(e, workload, memory) <= room]
    if on_accelerator:
        least = min(on_accelerator, key=lambda e: e.host_in_pieces)
        return Choice(
            estimate=least,
            fits=False,
            reason=_lacks_host(workload, least, memory),
            remedy=_host_remedy(least),
        )
    least = min(candidates, key=lambda e: peak(e, workload, memory))
    needed = _need(workload, least, memory)
    reason = (
        f"Nothing fits: {_model_in_words(workload)} need at least {needed}, with {least.name}, and there are "
        f"{_limit(workload, memory)}."
    )
    return Choice(estimate=least, fits=False, reason=reason, remedy=_remedy(workload, least))


def _reason(workload: Workload, chosen: Estimate, candidates: Iterable[Estimate], memory: Memory) -> str:
    room = usable_bytes(workload, memory)
    before = next((e for e in candidates if peak(e, workload, memory) > room), None)
    others = (
        f"; {before.name} would need {in_gib(peak(before, workload, memory))}"
        if before and chosen.strategy != DDP
        else ""
    )
    return (
        f"{_model_in_words(workload)} need about {_need(workload, chosen, memory)} with {chosen.name}, of "
        f"{_limit(workload, memory)}{others}.{_host_in_words(workload, chosen, memory)}"
    )


def _host_in_words(workload: Workload, estimate: Estimate, memory: Memory) -> str:
    pieces = _pieces_in_words(estimate) if in_pieces(estimate, workload, memory) else ""
    if not memory.offloads:
        return pieces
    what = "stages its share of a checkpoint on the CPU"
    if estimate.host == estimate.host_start:
        what = "builds the whole model on the CPU first"
    elif estimate.offload_optimizer:
        what = "takes memory on the CPU, too"
    elif pieces:
        return pieces
    return f" Each rank {what}: {in_gib(host_needed(estimate, workload, memory))}.{pieces}"


def _pieces_in_words(estimate: Estimate) -> str:
    return (
        f" A rank's share of a checkpoint, {in_gib(estimate.staging)}, doesn't fit into its share of the node's "
        f"memory. So it is staged in pieces of {PIECE_BYTES >> 20} MiB, and training waits for the upload of each "
        "checkpoint."
    )


def _model_in_words(workload: Workload) -> str:
    return f"{_in_words(workload.model.num_parameters)} parameters on {counted(workload.world_size, 'rank')}"


def _need(workload: Workload, estimate: Estimate, memory: Memory) -> str:
    needed = peak(estimate, workload, memory)
    start = " while the model is spread" if needed == estimate.start + RUNTIME_BYTES else ""
    return f"{in_gib(needed)} each{start}"


def _limit(workload: Workload, memory: Memory) -> str:
    place = "an accelerator's" if memory.offloads else "a rank's share of the node's"
    limit = f"{in_gib(usable_bytes(workload, memory))} of {place} {in_gib(memory.accelerator_bytes)}"
    if workload.sequence_length is None:
        limit += " (the rest is left to activations, as the number of tokens in a sample is not known)"
    return limit


def _lacks_host(workload: Workload, estimate: Estimate, memory: Memory) -> str:
    share = in_gib(memory.host_bytes or 0)
    if estimate.host_in_pieces == estimate.host_start:
        return (
            f"Nothing fits: before it is spread, each rank builds the whole model on the CPU, "
            f"{_in_words(workload.model.num_parameters)} parameters in {in_gib(estimate.host_start)}, and a rank's "
            f"share of the node's memory is {share}."
        )
    return (
        f"Nothing fits: {_model_in_words(workload)} leave {in_gib(estimate.host_in_pieces)} each on the CPU, with "
        f"{estimate.name}, and a rank's share of the node's memory is {share}."
    )


def _host_remedy(estimate: Estimate) -> str:
    if estimate.host_in_pieces != estimate.host_start:
        return "Raise nodes.min, or use nodes with more memory."
    return "Lower processesPerNode, or use nodes with more memory."


def _remedy(workload: Workload, estimate: Estimate) -> str:
    if estimate.activations < estimate.total / 2:
        return "Raise nodes.min, or use accelerators with more memory."
    checkpointing = "" if workload.activation_checkpointing else ", set activationCheckpointing"
    return f"Activations take most of it: lower batch.micro{checkpointing}, or use accelerators with more memory."


def _in_words(num: int) -> str:
    units = ((10**12, "trillion"), (10**9, "billion"), (10**6, "million"), (1000, "thousand"))
    return next((f"{num / unit:.3g} {word}" for unit, word in units if num >= unit), str(num))
