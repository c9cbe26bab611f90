"""Under ZeRO all ranks have to use the same parameters, in the same order; this looks whether they did."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from itertools import zip_longest
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from spottrain.failures import UserError
from spottrain_api.contract import FailureReason


class SameParameters:
    """Of one rank. DeepSpeed adds gradients up in the order in which they come and doesn't look whose they are, so
    `check` comes before it does. Made on all ranks at once, when DeepSpeed has the model."""

    def __init__(self, names: Mapping[nn.Parameter, str]) -> None:
        self._names = list(names.values())
        self._used: list[int] = []
        # Its own, as other collectives of the ranks may no longer fit each other.
        self._group = dist.new_group(backend="gloo")
        for index, parameter in enumerate(names):
            if parameter.requires_grad and not _is_of_leaf(parameter):
                parameter.register_post_accumulate_grad_hook(self._note(index))  # type: ignore[no-untyped-call]

    def check(self) -> None:
        """Compare what backward has given gradients to since the last time. A collective; raises UserError."""
        digest = hash(tuple(self._used)) >> 1
        extremes = torch.tensor([digest, -digest])
        dist.all_reduce(extremes, op=dist.ReduceOp.MAX, group=self._group)
        if extremes.sum() != 0:
            raise UserError(FailureReason.INVALID_CONFIGURATION, self._sentence())
        self._used.clear()

    def _note(self, index: int) -> Callable[[Any], None]:
        return lambda _: self._used.append(index)

    def _sentence(self) -> str:
        every: list[list[int]] = [[] for _ in range(dist.get_world_size())]
        dist.all_gather_object(every, self._used, group=self._group)
        rank = next(rank for rank, used in enumerate(every) if used != every[0])
        pairs = zip_longest(every[0], every[rank])
        first, other = next((a, b) for a, b in pairs if a != b)
        return (
            "The ranks used different parameters in a micro-batch, or in another order: in backward rank 0 used "
            f"{self._name(first)} where rank {rank} used {self._name(other)}. ZeRO 1 to 3 would mix their gradients "
            "up. Use the strategy fsdp, or let every rank use all of them."
        )

    def _name(self, index: int | None) -> str:
        return "no more" if index is None else self._names[index]


def _is_of_leaf(parameter: Any) -> bool:
    """Of a module of deepspeed.utils.set_z3_leaf_modules: all of it has a gradient at once, zero if need be."""
    return hasattr(parameter, "ds_z3_leaf_module")
