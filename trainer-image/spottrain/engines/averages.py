"""A running average of weights: a part of the model that isn't trained, and that follows a part that is.

Under FSDP2 and ZeRO 3, each rank has the same part of a parameter and of its average. To average the parts is to
average the whole, so that the result doesn't depend on the strategy or on the number of ranks.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from spottrain.engines.model_state import unwrapped
from spottrain.world.failures import UserError

Pair = tuple[nn.Parameter, nn.Parameter]
"""A parameter of the average, and the one that it follows."""


def pairs(models: Iterable[nn.Module], average: nn.Module, source: nn.Module) -> list[Pair]:
    """The parameters of the average with those that they follow.

    Raises:
        UserError: The average or its source is not a part of the model, they differ in structure, or the average is
            trained.
    """
    known = {parameter for model in models for parameter in model.parameters()}
    followers, followed = _named(average.named_parameters()), _named(source.named_parameters())
    for name, parameter in followers.items():
        if parameter.requires_grad:
            raise UserError(
                f"the parameter {name} of the average is trained; call average.requires_grad_(False) before "
                "session.prepare"
            )
    if not known.issuperset((*followers.values(), *followed.values())):
        raise UserError(
            "the average and what it follows have to be parts of the model that session.prepare was given, so that "
            "commits hold both: put them into one nn.Module"
        )
    shapes = [{name: _shape(each) for name, each in part.items()} for part in (followers, followed)]
    if shapes[0] != shapes[1]:
        name = next(n for n in (*shapes[1], *shapes[0]) if shapes[0].get(n) != shapes[1].get(n))
        raise UserError(
            f"the average has not the parameters of what it follows: {name} differs; make it by "
            "copy.deepcopy(source).requires_grad_(False)"
        )
    return [(parameter, followed[name]) for name, parameter in followers.items()]


@torch.no_grad()
def follow(parts: Iterable[tuple[torch.Tensor, torch.Tensor]], decay: float) -> None:
    """Set each average to `decay` times itself and the rest of what it follows. Both are this rank's parts."""
    for average, source in parts:
        _local(average).lerp_(_local(source).to(average.dtype), 1.0 - decay)


@torch.no_grad()
def copy_buffers(average: nn.Module, source: nn.Module) -> None:
    """Give the average the buffers of what it follows, as torch's AveragedModel does."""
    buffers = dict(source.named_buffers())
    for name, buffer in average.named_buffers():
        if name in buffers:
            buffer.copy_(buffers[name])


def follow_in_parts(of_pairs: list[Pair], decay: float) -> None:
    """As `follow`, of parameters that ZeRO 3 has partitioned. A collective if ranks hold some of them as a whole."""
    follow(((each.ds_tensor, source.ds_tensor) for each, source in _partitioned(of_pairs)), decay)
    # Small parameters, which stay whole between the steps. They are made of the parts anew.
    whole = [each for each, _ in _partitioned(of_pairs) if each.ds_status.name == "AVAILABLE"]
    if whole:
        whole[0].partition(param_list=whole, has_been_updated=False)
        whole[0].all_gather(whole)


class LostChanges:
    """Notices that a script changes, in place, a parameter that ZeRO 3 has partitioned and doesn't train.

    Such a change is lost without a word: what the script sees is empty, or a copy of the parts. Through
    `parameter.data` it stays unnoticed.
    """

    def __init__(self, model: nn.Module) -> None:
        frozen = ((name, each) for name, each in model.named_parameters() if not each.requires_grad)
        self._seen = {name: (each, each._version, _sum(each)) for name, each in frozen}

    def check(self) -> None:
        """Raises UserError."""
        for name, (parameter, version, before) in self._seen.items():
            if parameter._version == version:
                continue
            now = _sum(parameter)
            if now == before:  # not by DeepSpeed's GatheredParameters
                raise UserError(
                    f"The script changes the parameter {name}, which is not trained, in place. That has no effect "
                    "under ZeRO 3, which holds its values elsewhere, in a part on each rank. For an average of "
                    "weights, call training.update_average(average, source, decay=...), which works under every "
                    "strategy; for other changes use the strategy fsdp or ddp."
                )
            self._seen[name] = parameter, parameter._version, now


def _sum(parameter: Any) -> float:
    return float(parameter.ds_tensor.double().sum())


def _partitioned(of_pairs: list[Pair]) -> Iterator[tuple[Any, Any]]:
    yield from of_pairs  # with attributes of DeepSpeed's


def _named(parameters: Iterable[tuple[str, nn.Parameter]]) -> dict[str, nn.Parameter]:
    return {unwrapped(name): parameter for name, parameter in parameters}


def _shape(parameter: Any) -> torch.Size:
    shape: torch.Size = getattr(parameter, "ds_shape", parameter.shape)
    return shape


def _local(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor
