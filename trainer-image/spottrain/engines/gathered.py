"""The parameters of a model under FSDP2, which are gathered at times."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from spottrain.engines.used import UsedParameters


@dataclass(frozen=True, slots=True, kw_only=True)
class _Place:
    """Where the model has a parameter.

    Attributes:
        module: Module of the parameter.
        attribute: Its name in the module.
        name: Its name in the model.
        own: The sharded parameter, which the optimizer has.
    """

    module: nn.Module
    attribute: str
    name: str
    own: nn.Parameter

    @property
    def present(self) -> nn.Parameter | None:
        return self.module._parameters[self.attribute]


class GatheredParameters:
    """Knows which parameters of a spread model are gathered.

    While a block is gathered, FSDP2 puts other parameters into the model in the place of its own. They have no
    gradients, and an update doesn't reach them.
    """

    def __init__(self, model: nn.Module) -> None:
        self._blocks: list[Any] = [module for module in model.modules() if isinstance(module, FSDPModule)]
        self._places = [
            _Place(module=module, attribute=attribute, name=f"{prefix}.{attribute}".lstrip("."), own=parameter)
            for prefix, module in model.named_modules()
            for attribute, parameter in module._parameters.items()
            if parameter is not None and isinstance(parameter.data, DTensor)
        ]

    def reshard(self) -> None:
        """Give the model its own parameters back. What reads or changes them calls this first."""
        for block in self._blocks:
            block.reshard()

    def first(self) -> str | None:
        """The name of a parameter that is gathered now; None if none is."""
        return next((place.name for place in self._places if place.present is not place.own), None)

    def watch(self, used: UsedParameters) -> None:
        """Let `used` note the gradients of the gathered parameters, which are there from a block's first call on."""
        left = {place.own: place for place in self._places if place.own in used}  # a tied one has several places
        for block in reversed(self._blocks):  # inner ones first
            _watch_from_first_call(block, [left.pop(each) for each in block.parameters() if each in left], used)


def _watch_from_first_call(block: nn.Module, places: list[_Place], used: UsedParameters) -> None:
    def watch(*_: object) -> None:
        for place in places:
            assert place.present is not None
            used.watch(place.own, place.present)
        handle.remove()

    handle = block.register_forward_pre_hook(watch)
