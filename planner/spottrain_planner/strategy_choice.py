"""Chooses the strategy that fits into a machine's memory, and explains why.

Sizes are in bytes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass

from spottrain_planner.memory_estimate import DDP, RUNTIME_BYTES, Estimate, Workload, estimates, in_gib
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
    return peak(estimate, memory) <= usable_bytes(workload, memory) and _fits_host(estimate, memory)


def peak(estimate: Estimate, memory: Memory) -> int:
    """Bytes at the peak of the run. Ranks that compute on the CPU stage checkpoints in the same memory."""
    if memory.offloads:
        return estimate.total
    return max(estimate.step + estimate.staging, estimate.start) + RUNTIME_BYTES


def _fits_host(estimate: Estimate, memory: Memory) -> bool:
    return memory.host_bytes is None or estimate.host <= memory.host_bytes


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
    on_accelerator = [e for e in candidates if peak(e, memory) <= room]
    if on_accelerator:
        least = min(on_accelerator, key=lambda e: e.host)
        return Choice(
            estimate=least,
            fits=False,
            reason=_lacks_host(workload, least, memory),
            remedy=_host_remedy(workload, least),
        )
    least = min(candidates, key=lambda e: peak(e, memory))
    reason = (
        f"Nothing fits: {_model_in_words(workload)} need at least {_need(least, memory)}, with {least.name}, and "
        f"there are {_limit(workload, memory)}."
    )
    return Choice(estimate=least, fits=False, reason=reason, remedy=_remedy(workload, least))


def _reason(workload: Workload, chosen: Estimate, candidates: Iterable[Estimate], memory: Memory) -> str:
    room = usable_bytes(workload, memory)
    before = next((e for e in candidates if peak(e, memory) > room), None)
    others = f"; {before.name} would need {in_gib(peak(before, memory))}" if before and chosen.strategy != DDP else ""
    return (
        f"{_model_in_words(workload)} need about {_need(chosen, memory)} with {chosen.name}, of "
        f"{_limit(workload, memory)}{others}.{_host_in_words(workload, chosen, memory)}"
    )


def _host_in_words(workload: Workload, estimate: Estimate, memory: Memory) -> str:
    if not memory.offloads:
        return ""
    what = "stages its share of a checkpoint on the CPU"
    if estimate.host == workload.model.built:
        what = "builds the whole model on the CPU first"
    elif estimate.offload_optimizer:
        what = "takes memory on the CPU, too"
    return f" Each rank {what}: {in_gib(estimate.host)}."


def _model_in_words(workload: Workload) -> str:
    return f"{_in_words(workload.model.num_parameters)} parameters on {counted(workload.world_size, 'rank')}"


def _need(estimate: Estimate, memory: Memory) -> str:
    needed = peak(estimate, memory)
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
    if estimate.host == workload.model.built:
        return (
            f"Nothing fits: before it is spread, each rank builds the whole model on the CPU, "
            f"{_in_words(workload.model.num_parameters)} parameters in {in_gib(estimate.host)}, and a rank's share "
            f"of the node's memory is {share}."
        )
    return (
        f"Nothing fits: {_model_in_words(workload)} leave {in_gib(estimate.host)} each on the CPU, with "
        f"{estimate.name}, and a rank's share of the node's memory is {share}."
    )


def _host_remedy(workload: Workload, estimate: Estimate) -> str:
    if estimate.host != workload.model.built:
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
