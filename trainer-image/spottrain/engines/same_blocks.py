"""Under FSDP2 all ranks have to call the same blocks, in the same order; this looks whether they did."""

from __future__ import annotations

from collections.abc import Mapping

from torch import nn

from spottrain.engines.same_order import SameOrder
from spottrain.world.failures import UserError
from spottrain_api.contract import FailureReason


class SameBlocks:
    """Of one rank. A block is gathered when it is called, from the ranks that gather something then, whatever it is.
    `compare` comes after each forward, and `check` after backward, so that a step doesn't wait for it: what is wrong
    is told before the update. Blocks that are `kept` after a forward are gathered once until backward, however often
    they are called, as in evaluations of different length. Made on all ranks at once."""

    def __init__(self, blocks: Mapping[str, nn.Module], *, kept: bool) -> None:
        self._order = SameOrder(list(blocks))
        for index, block in enumerate(blocks.values()):
            block.register_forward_pre_hook(self._order.note(index, once=kept))

    def compare(self) -> None:
        """Begin to compare what was called since the last time. A collective."""
        self._order.compare()

    def check(self) -> None:
        """A collective; raises UserError."""
        found = self._order.difference()
        self._order.forget()  # what backward has called again for activation checkpointing
        if found is not None:
            raise UserError(
                FailureReason.INVALID_CONFIGURATION,
                "The ranks called different blocks of the model, or in another order: rank 0 called "
                f"{found.first} where rank {found.rank} called {found.other}. FSDP2 has mixed their parameters up. "
                "Name blocks that every rank calls for every sample as `wrap` in session.prepare (none: wrap=[]), or "
                "use the strategy ddp.",
            )
