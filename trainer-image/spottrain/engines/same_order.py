"""Check that all ranks act in the same order, in which their collectives meet."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import zip_longest
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from spottrain import exchange
from spottrain.world.failures import UserError
from spottrain.world.launch import gloo_group


@dataclass(frozen=True, slots=True)
class Difference:
    """The first difference: what rank 0 did, and what `rank` did instead."""

    first: str
    rank: int
    other: str


class SameOrder:
    """Compares the order in which ranks act.

    It records what one rank does, by index among `names`, and compares it with the other ranks. The constructor is a
    collective.
    """

    def __init__(self, names: Sequence[str]) -> None:
        self._names = names
        self._done: list[int] = []
        # A group of its own: the collectives of other groups may no longer match.
        self._group = gloo_group()

    def note(self, index: int, *, once: bool = False) -> Callable[..., None]:
        """A hook that records the thing at that index.

        With `once`, the hook records it only if it is not recorded yet.
        """

        def note(*_: Any) -> None:
            if not (once and index in self._done):
                self._done.append(index)

        return note

    def forget(self) -> None:
        """Drop what was recorded since the last comparison."""
        self._done = []

    def compare(self) -> None:
        """Start to compare what was recorded since the last time, by two numbers. A collective that does not wait."""
        digest = hash(tuple(self._done)) >> 1
        self._extremes = torch.tensor([digest, -digest])
        self._compared, self._done = self._done, []
        self._work = dist.all_reduce(self._extremes, op=dist.ReduceOp.MAX, group=self._group, async_op=True)

    def difference(self) -> Difference | None:
        """Wait for the result of the comparison, the same on all ranks."""
        self._work.wait()
        return self._first_difference() if self._extremes.sum() != 0 else None

    def _first_difference(self) -> Difference:
        every = exchange.all_gather(self._compared, self._group)
        rank = next(rank for rank, done in enumerate(every) if done != every[0])
        first, other = next((a, b) for a, b in zip_longest(every[0], every[rank]) if a != b)
        return Difference(self._name(first), rank, self._name(other))

    def _name(self, index: int | None) -> str:
        return "no more" if index is None else self._names[index]


class SameBlocks:
    """Checks the calls of one rank. The constructor is a collective.

    FSDP2 gathers a block when it is called, from the ranks that gather at that time, whichever block they gather.
    Call `compare` after each forward pass and `check` after backward, so that a step does not wait: an error is
    raised before the update. Blocks that are `kept` after a forward pass are gathered once until backward, however
    often they are called, as in evaluations of different length.
    """

    def __init__(self, blocks: Mapping[str, nn.Module], *, kept: bool) -> None:
        self._order = SameOrder(list(blocks))
        for index, block in enumerate(blocks.values()):
            block.register_forward_pre_hook(self._order.note(index, once=kept))

    def compare(self) -> None:
        """Start to compare the calls since the last time. A collective."""
        self._order.compare()

    def check(self) -> None:
        """Raise UserError if the calls differed. A collective."""
        found = self._order.difference()
        self._order.forget()  # calls of backward for activation checkpointing
        if found is not None:
            raise UserError(
                "The ranks called different blocks of the model, or in a different order: rank 0 called "
                f"{found.first} where rank {found.rank} called {found.other}. FSDP2 has mixed their parameters up. "
                "Name blocks that every rank calls for every sample as `wrap` in session.prepare (none: wrap=[]), or "
                "use the strategy ddp."
            )


class SameParameters:
    """Checks what one rank uses. The constructor is a collective, after DeepSpeed has wrapped the model.

    DeepSpeed adds up gradients in the order in which they arrive, without a look at their parameters. So call `check`
    before it does.
    """

    def __init__(self, names: Mapping[nn.Parameter, str]) -> None:
        self._order = SameOrder(list(names.values()))
        for index, parameter in enumerate(names):
            if parameter.requires_grad and not _is_of_leaf(parameter):
                parameter.register_post_accumulate_grad_hook(self._order.note(index))  # type: ignore[no-untyped-call]

    def check(self) -> None:
        """Compare the parameters that received gradients since the last time. A collective; raises UserError."""
        self._order.compare()
        found = self._order.difference()
        if found is not None:
            raise UserError(
                "The ranks used different parameters in a micro-batch, or in a different order: in backward, rank 0 "
                f"used {found.first} where rank {found.rank} used {found.other}. ZeRO 1 to 3 would mix their "
                "gradients up. Use the strategy fsdp, or let every rank use all of them."
            )


def _is_of_leaf(parameter: Any) -> bool:
    """Whether the parameter belongs to a leaf module of ZeRO 3.

    `deepspeed.utils.set_z3_leaf_modules` makes such modules. All parameters of such a module receive gradients at
    once, zero if necessary.
    """
    return hasattr(parameter, "ds_z3_leaf_module")
