"""A check under FSDP2: all ranks have to call the same blocks, in the same order."""

from __future__ import annotations

from collections.abc import Mapping

from torch import nn

from spottrain.engines.same_order import SameOrder
from spottrain.world.failures import UserError


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
