"""Numbers in attributes of an optimizer, such as the steps that a wrapper counts to do something in every k-th.

Its state_dict doesn't have them, so a resume would begin them anew. A commit holds those that have changed since the
optimizer was made. Others are settings, such as k, or follow from the world, such as a rank: the script's count.
"""

from __future__ import annotations

from weakref import WeakKeyDictionary

from torch.optim import Optimizer

Numbers = dict[str, int | float]

_at_first: WeakKeyDictionary[Optimizer, Numbers] = WeakKeyDictionary()


def watch_numbers(optimizer: Optimizer) -> None:
    """Remember what its numbers are before the first step."""
    _at_first[optimizer] = numbers_of(optimizer)


def changed_numbers(optimizer: Optimizer) -> Numbers:
    """The numbers that have changed since `watch_numbers`, or appeared."""
    first = _at_first.get(optimizer, numbers_of(optimizer))
    return {name: value for name, value in numbers_of(optimizer).items() if value != first.get(name)}


def set_numbers(optimizer: Optimizer, saved: Numbers) -> None:
    """Set what a commit holds; numbers that had not changed by then are as at first."""
    for name, value in {**_at_first.get(optimizer, {}), **saved}.items():
        setattr(optimizer, name, value)


def numbers_of(optimizer: Optimizer) -> Numbers:
    """All of an optimizer's numbers, by name."""
    return {name: value for name, value in vars(optimizer).items() if type(value) in (int, float)}
