"""Optimizers that others keep and step, as Lookahead and SAM do.

Some share their state and groups with the one that keeps them, until torch's load_state_dict gives that one others.
Some have a state that no state_dict has, and that a resume would begin anew.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch.optim import Optimizer

from spottrain.checkpoint.errors import UnsupportedState


def check_inner(optimizer: Optimizer, state_dict: Mapping[str, Any]) -> None:
    """Raise UnsupportedState if an optimizer in `optimizer` has state that `state_dict` lacks."""
    known = {id(each) for each in _tensors(state_dict)}
    for inner, name in _inner(optimizer).items():
        if inner.state is not optimizer.state and any(id(each) not in known for each in _tensors(inner.state)):
            kind, base = type(optimizer).__name__, type(inner).__name__
            raise UnsupportedState(
                f"The optimizer {kind} keeps another one ({name}, {base}) whose state is not in its state_dict, so "
                f"that a resume would begin that anew. Give {kind} a state_dict and a load_state_dict that have both."
            )


def share_again(optimizer: Optimizer, shared: list[tuple[Optimizer, bool, bool]]) -> None:
    """Share state and groups with those optimizers that `sharing` has found."""
    for inner, state, groups in shared:
        if state:
            inner.state = optimizer.state
        if groups:
            inner.param_groups = optimizer.param_groups


def sharing(optimizer: Optimizer) -> list[tuple[Optimizer, bool, bool]]:
    """The optimizers in `optimizer`, and whether they have its state and its groups."""
    return [
        (inner, inner.state is optimizer.state, inner.param_groups is optimizer.param_groups)
        for inner in _inner(optimizer)
    ]


def _inner(optimizer: Optimizer) -> dict[Optimizer, str]:
    """The optimizers that it keeps, and those that they keep, with the names of their attributes."""
    found: dict[Optimizer, str] = {}
    waiting = [optimizer]
    while waiting:
        for name, each in vars(waiting.pop()).items():
            if isinstance(each, Optimizer) and each is not optimizer and each not in found:
                found[each] = name
                waiting.append(each)
    return found


def _tensors(values: Any) -> Iterator[torch.Tensor]:
    if isinstance(values, torch.Tensor):
        yield values
    elif isinstance(values, Mapping):
        for each in values.values():
            yield from _tensors(each)
    elif isinstance(values, list | tuple):
        for each in values:
            yield from _tensors(each)
