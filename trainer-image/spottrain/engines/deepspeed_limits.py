"""Models and optimizers that DeepSpeed fails on, or trains differently.

DeepSpeed does not say what to do about them.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

import torch
from torch import nn
from torch.optim import Adagrad, Optimizer

from spottrain.engines.elementwise import uses_whole_tensors
from spottrain.engines.model_state import unfit_for_shards, wrapping_names
from spottrain.engines.own_numbers import numbers_of
from spottrain.world.failures import UserError

# Words in the names of optimizers whose update of an element depends on the rest of its tensor, or, as the rates of
# Prodigy and D-Adaptation, on all tensors. Others are found by a trial.
_OF_WHOLE_TENSORS = {
    *("adafactor", "lamb", "lars", "muon", "novograd", "shampoo", "soap"),
    *("dadaptadagrad", "dadaptadam", "dadaptadan", "dadaptlion", "dadaptsgd", "prodigy"),
}
# Those among them that keep lists in their state, which a checkpoint can't hold under any strategy.
_WITH_LISTS = {"shampoo", "soap"}
# Types whose gradients DeepSpeed adds up at stage 0.
_SUMMED = {torch.float16, torch.bfloat16, torch.float32}


def unfit_for_zero(model: nn.Module, stage: int, precision: torch.dtype) -> str | None:
    """Why DeepSpeed cannot train `model` at a ZeRO stage, as a sentence; None if it can."""
    if (wrapping := next(wrapping_names(model), None)) is not None:
        kind = type(model.get_parameter(wrapping)).__name__
        return f"The parameter {wrapping} is of the type {kind}, which DeepSpeed can't move. Use the strategy ddp."
    if stage == 3 and (refusal := unfit_for_shards(model)) is not None:
        return refusal
    trained = {name: parameter for name, parameter in model.named_parameters() if parameter.requires_grad}
    is_cast = stage > 0 and precision is not torch.float32
    types: dict[torch.dtype, str] = {}
    for name, parameter in trained.items():
        types.setdefault(precision if is_cast and parameter.is_floating_point() else parameter.dtype, name)
    for dtype, name in types.items():
        if dtype.is_complex or (stage == 0 and dtype not in _SUMMED):
            return f"The parameter {name} is of {dtype}, which DeepSpeed can't train. Use the strategy ddp or fsdp."
    if stage > 0 and len(types) > 1:
        named = " and ".join(f"{name} of {dtype}" for dtype, name in list(types.items())[:2])
        return (
            f"The model's parameters are of several types ({named}), and ZeRO trains all in one. Use precision bf16, "
            "which computes in it and keeps weights in fp32, or the strategy ddp or fsdp."
        )
    empty = next((name for name, parameter in model.named_parameters() if not parameter.numel()), None)
    if stage == 3 and empty is not None:
        return (
            f"The parameter {empty} has no elements, which ZeRO 3 can't gather. Leave it out of the model, or use "
            "another stage or the strategy fsdp."
        )
    return None


def _words(name: str) -> set[str]:
    """The words of a class's name in lower case, and the whole name: MuonWithAuxAdam is a Muon."""
    return {word.lower() for word in (*re.findall(r"[A-Z]+(?![a-z])|[A-Z]?[a-z]+", name), name)}


def refuse_counters(base: Optimizer, num_flats: int) -> None:
    """Make the first update raise UserError if the optimizer changes its numbers or options of groups in a step.

    ZeRO 3 steps it once for each of its flat tensors, each time with all groups.
    """
    if num_flats < 2:
        return
    before: list[dict[str, str]] = []
    calls = 0

    def note(*_: Any) -> None:
        before[:] = _counters(base)

    def compare(*_: Any) -> None:
        nonlocal calls
        calls += 1
        changed = [
            key
            for old, now in zip(before, _counters(base), strict=True)
            for key, value in now.items()
            if old.get(key) != value
        ]
        if changed:
            raise UserError(
                f"The optimizer {type(base).__name__} counts its steps by itself ({changed[0]}), and ZeRO 3 "
                f"calls it {num_flats} times a step. Give it one group, or use another stage or the strategy fsdp."
            )
        if calls == num_flats:
            for hook in hooks:
                hook.remove()

    hooks = [base.register_step_pre_hook(note), base.register_step_post_hook(compare)]


def _counters(optimizer: Optimizer) -> list[dict[str, str]]:
    """What may count the steps: options of groups, numbers in attributes, and state that is of no parameter."""
    beside = {str(key): value for key, value in optimizer.state.items() if not isinstance(key, torch.Tensor)}
    return [_in_words(each) for each in (*optimizer.param_groups, numbers_of(optimizer), beside)]


def _in_words(values: Mapping[str, Any]) -> dict[str, str]:
    return {
        key: repr(value) for key, value in values.items() if key != "params" and not isinstance(value, torch.Tensor)
    }


def unfit_optimizer(optimizer: Optimizer, stage: int) -> str | None:
    """Why a ZeRO stage cannot use `optimizer`, as a sentence; None if it can."""
    if stage > 0:
        kinds = [kind for kind in type(optimizer).__mro__ if not kind.__module__.startswith("deepspeed.")]
        words = {word for kind in kinds for word in _words(kind.__name__)}
        if not words.isdisjoint(_OF_WHOLE_TENSORS) or uses_whole_tensors(optimizer):
            others = ", or deepspeed.zeroStage 0, or the strategy ddp" if words.isdisjoint(_WITH_LISTS) else ""
            return (
                f"The optimizer {type(optimizer).__name__} computes with each tensor as a whole, and ZeRO {stage} "
                "gives it parts that depend on the number of ranks. Use one that treats each element alone, such as "
                f"AdamW{others}."
            )
        for key, value in optimizer.state_dict().items():
            if key not in ("state", "param_groups") and not isinstance(value, int | float | str | None):
                return (
                    f"The optimizer {type(optimizer).__name__} has {key!r} in its state_dict, which ZeRO leaves out. "
                    "Use deepspeed.zeroStage 0, the strategy ddp or fsdp, or another optimizer."
                )
    if stage > 0 and isinstance(optimizer, Adagrad):
        # DeepSpeed replaces it by one that it makes from these defaults alone.
        first, *more = optimizer.param_groups
        if more or any(first[option] != value for option, value in optimizer.defaults.items()):
            return (
                f"ZeRO {stage} makes a new Adagrad from the options of its constructor, and drops its groups. "
                "Give it one group and no other options, or use deepspeed.zeroStage 0 or the strategy fsdp."
            )
    if stage in (1, 2):
        for index, group in enumerate(optimizer.param_groups):
            if not any(parameter.requires_grad for parameter in group["params"]):
                return (
                    f"The optimizer's parameter group {index} has no parameter that is trained, and ZeRO {stage} "
                    "can't use such a group. Make the optimizer without it."
                )
    return None
