"""Under ZeRO all ranks have to use the same parameters, in the same order; this looks whether they did."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import nn

from spottrain.engines.same_order import SameOrder
from spottrain.world.failures import UserError
from spottrain_api.contract import FailureReason


class SameParameters:
    """Of one rank. DeepSpeed adds gradients up in the order in which they come and doesn't look whose they are, so
    `check` comes before it does. Made on all ranks at once, when DeepSpeed has the model."""

    def __init__(self, names: Mapping[nn.Parameter, str]) -> None:
        self._order = SameOrder(list(names.values()))
        for index, parameter in enumerate(names):
            if parameter.requires_grad and not _is_of_leaf(parameter):
                parameter.register_post_accumulate_grad_hook(self._order.note(index))  # type: ignore[no-untyped-call]

    def check(self) -> None:
        """Compare what backward has given gradients to since the last time. A collective; raises UserError."""
        self._order.compare()
        found = self._order.difference()
        if found is not None:
            raise UserError(
                FailureReason.INVALID_CONFIGURATION,
                "The ranks used different parameters in a micro-batch, or in another order: in backward rank 0 used "
                f"{found.first} where rank {found.rank} used {found.other}. ZeRO 1 to 3 would mix their gradients "
                "up. Use the strategy fsdp, or let every rank use all of them.",
            )


def _is_of_leaf(parameter: Any) -> bool:
    """Of a module of deepspeed.utils.set_z3_leaf_modules: all of it has a gradient at once, zero if need be."""
    return hasattr(parameter, "ds_z3_leaf_module")
