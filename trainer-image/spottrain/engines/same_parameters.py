"""A check under ZeRO: all ranks use the same parameters, in the same order."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import nn

from spottrain.engines.same_order import SameOrder
from spottrain.world.failures import UserError


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
