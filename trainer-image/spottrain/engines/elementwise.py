"""Whether an optimizer treats each element of a parameter alone, found by a trial."""

from __future__ import annotations

import copy
from collections import OrderedDict, defaultdict
from collections.abc import Sequence
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

# Elements of the tensor of a trial, and how two ranks would share them.
_SHAPE, _SHARES = (6, 4), (10, 14)
_STEPS = 3
_RATE = 0.1
# Attributes that a trial does not take over: hooks, and a step that a schedule has replaced.
_OWN = ("state", "param_groups", "step", "_optimizer_step_pre_hooks", "_optimizer_step_post_hooks")


def uses_whole_tensors(optimizer: Optimizer) -> bool:
    """Whether its update of an element depends on other elements, as if it scales by norms or by factors.

    Copies of the optimizer update small tensors of their own, once whole and once in the shares of two ranks. An
    optimizer that can't be tried counts as one that treats each element alone: it has more attributes than plain
    values, such as another optimizer, or its step needs more than gradients.
    """
    kind = type(optimizer)
    if hasattr(kind, "__del__") or kind.__module__.startswith("deepspeed."):  # DeepSpeed's own know ZeRO
        return False
    if not all(_is_plain(value) for name, value in vars(optimizer).items() if name not in _OWN):
        return False
    return any(_differs(optimizer, group) for group in optimizer.param_groups)


def _differs(optimizer: Optimizer, group: dict[str, Any]) -> bool:
    device = next((each.device for each in group["params"]), torch.device("cpu"))
    generator = torch.Generator().manual_seed(0)
    first = torch.randn(_SHAPE, generator=generator).to(device)
    scale = torch.linspace(0.1, 2, first.numel()).view(_SHAPE)
    gradients = [(torch.randn(_SHAPE, generator=generator) * scale).to(device) for _ in range(_STEPS)]
    try:
        whole = _updated(optimizer, group, first, gradients)
    except Exception:  # whatever an optimizer raises that needs more than gradients
        return False
    shares = zip(*(each.flatten().split_with_sizes(_SHARES) for each in (first, *gradients)), strict=True)
    try:
        parts = [_updated(optimizer, group, part, of_part) for part, *of_part in shares]
    except Exception:  # such as Muon's, which takes nothing but matrices
        return True
    return not torch.allclose(torch.cat(parts), whole.flatten(), rtol=1e-4, atol=1e-6)


def _updated(
    optimizer: Optimizer, group: dict[str, Any], first: torch.Tensor, gradients: Sequence[torch.Tensor]
) -> torch.Tensor:
    """What a copy of the optimizer without state makes of a tensor."""
    parameter = nn.Parameter(first.clone())
    options = {key: copy.deepcopy(value) for key, value in group.items() if key not in ("params", "param_names")}
    if "lr" in options:  # a warm-up may begin with 0
        options["lr"] = torch.full_like(options["lr"], _RATE) if isinstance(options["lr"], torch.Tensor) else _RATE
    trial = object.__new__(type(optimizer))
    vars(trial).update({name: copy.deepcopy(value) for name, value in vars(optimizer).items() if name not in _OWN})
    vars(trial).update(state=defaultdict(dict), param_groups=[{**options, "params": [parameter]}])
    vars(trial).update(_optimizer_step_pre_hooks=OrderedDict(), _optimizer_step_post_hooks=OrderedDict())
    for gradient in gradients:
        parameter.grad = gradient.clone()
        trial.step()
    return parameter.detach()


def _is_plain(value: Any) -> bool:
    if isinstance(value, dict):
        return all(_is_plain(each) for each in value.values())
    if isinstance(value, list | tuple):
        return all(map(_is_plain, value))
    return (
        value is None
        or isinstance(value, int | float | str)
        or (isinstance(value, torch.Tensor) and value.dim() == 0)
    )
