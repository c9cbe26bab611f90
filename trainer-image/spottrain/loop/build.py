"""Building a model whose first values a commit replaces: they need not be drawn.

To draw the weights of a large model takes longer than to read them. On a resume, calls that fill tensors with random
numbers write NaN instead, and the generators are set to what they were after the first build. If anything else was
drawn, or a tensor that no commit holds was filled, the model is built as usual.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from spottrain.data import random_state

# Key under which a commit holds a `Built.record`.
BUILD = "build"
_FILLS = (torch.ops.aten.normal_.default, torch.ops.aten.uniform_.default)


@dataclass(frozen=True, slots=True, kw_only=True)
class Built:
    """A model, and how it was built.

    Attributes:
        record: What a commit holds, for the next build: a digest of the random state before, and the state after it.
        blank: Names of the parameters without values.
    """

    model: nn.Module
    record: Mapping[str, Any]
    blank: frozenset[str] = frozenset()


def build(make: Callable[[], nn.Module], saved: Mapping[str, Any] | None) -> Built:
    """Call `make`, and leave the generators as it does.

    Args:
        make: Builds the model. It may be called twice.
        saved: The record in the commit that is going to be loaded. None: without one, the values count.
    """
    before = random_state.capture()
    if saved is not None and saved["before"] == _digest(before):
        model = _without_values(make, before)
        random_state.restore(saved["after"] if model is not None else before)
        if model is not None:
            blank = frozenset(name for name, each in model.named_parameters() if _is_filled(each.detach()))
            return Built(model=model, record=saved, blank=blank)
    model = make()
    return Built(model=model, record={"before": _digest(before), "after": random_state.capture()})


class _Blank(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Fills with NaN what would be filled with random numbers of the default generator."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        named = kwargs or {}
        if func in _FILLS and named.get("generator") is None:
            return args[0].fill_(math.nan)
        return func(*args, **named)


def _without_values(make: Callable[[], nn.Module], before: dict[str, Any]) -> nn.Module | None:
    """The model, without first values. None if it can't be built so."""
    try:
        with _Blank():  # type: ignore[no-untyped-call]
            model = make()
    except Exception:  # such as a decomposition of NaN; if the script is wrong, the usual build says so
        return None
    is_whole = isinstance(model, nn.Module) and not any(map(_is_blank, _beside_state(model)))
    return model if is_whole and random_state.capture() == before else None


def _beside_state(model: nn.Module) -> Iterator[torch.Tensor]:
    """Tensors of the model that no commit holds."""
    saved = {id(value) for value in model.state_dict(keep_vars=True).values()}
    for module in model.modules():
        for value in (*module._buffers.values(), *vars(module).values()):
            if isinstance(value, torch.Tensor) and id(value) not in saved:
                yield value.detach()


def _is_filled(tensor: torch.Tensor) -> bool:
    """Whether a parameter, which may be large, was filled with NaN as a whole."""
    return bool(tensor.numel()) and _is_blank(tensor.flatten()[:1])


def _is_blank(tensor: torch.Tensor) -> bool:
    return tensor.is_floating_point() and bool(tensor.isnan().any())


def _digest(state: dict[str, Any]) -> str:
    return hashlib.sha256(repr(state).encode()).hexdigest()
