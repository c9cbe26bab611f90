"""The state of models under FSDP2."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from spottrain.checkpoint.errors import UnsupportedState
from spottrain.engines.gathered import GatheredParameters
from spottrain.engines.named_state import NamedState
from spottrain.engines.optimizer_state import NamedOptimizer


class ShardedState(NamedState):
    """Implements what `Engine` says of states, for models whose blocks are gathered at times.

    A forward pass puts gathered parameters into a model in the place of its own, and `state` takes them out again.
    `state_in_use` leaves them there: it has the model's own from the newest `state`.
    """

    _gathered: GatheredParameters
    _read_models: dict[str, Any]
    _read_names: dict[torch.Tensor, str]
    _read_frozen: set[str]

    def _at_rest(self) -> Mapping[str, nn.Module]:
        self._gathered.reshard()
        return self._models

    def _read(self) -> None:
        """Read the models, to know them in use."""
        self._names()
        with contextlib.suppress(UnsupportedState):  # the first save says so
            self._model_states()
            self.frozen()

    def _model_states(self) -> dict[str, Any]:
        self._read_models = super()._model_states()
        return self._read_models

    def frozen(self) -> set[str]:
        self._read_frozen = super().frozen()
        return self._read_frozen

    def _names(self) -> dict[torch.Tensor, str]:
        self._read_names = super()._names()
        return self._read_names

    def state_in_use(self) -> dict[str, Any]:
        changing = self.changing()
        models = {name: {**state, **changing[name]} for name, state in self._read_models.items() if name in changing}
        named = {name: NamedOptimizer(each, self._read_names) for name, each in self._optimizers.items()}
        return {**self._read_models, **models, **{name: each.state() for name, each in named.items()}}

    def frozen_in_use(self) -> set[str]:
        return self._read_frozen
