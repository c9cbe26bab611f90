"""The state of models and their optimizers in a commit, by the names of parameters."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from spottrain.engines.averages import copy_buffers, follow, pairs
from spottrain.engines.model_state import (
    changing_values,
    frozen_names,
    load_model_state,
    model_state,
    unwrapped,
    without_wrapper,
)
from spottrain.engines.optimizer_state import NamedOptimizer

# The model of this name is named in commits as if it were alone.
MODEL = "model"
OPTIMIZER = "optimizer"


class NamedState:
    """Implements what `Engine` says of states, for models with plain or sharded parameters and their optimizers.

    Each model, each optimizer and each tensor of no model has a name, which is its key in the state.
    """

    _models: Mapping[str, nn.Module]
    _optimizers: Mapping[str, Optimizer]
    _tensors: Mapping[str, torch.Tensor] = {}
    _beside: Sequence[torch.Tensor] = ()

    def _at_rest(self) -> Mapping[str, nn.Module]:
        """The models with their own parameters, which the optimizers have. What reads or changes them takes these."""
        return self._models

    def state(self) -> dict[str, Any]:
        optimizers = {name: each.state() for name, each in self._named_optimizers().items()}
        return {**self._model_states(), **optimizers}

    def room(self, saved: dict[str, Any]) -> dict[str, Any]:
        # What the commit lacks stays without room, and is refused by its name.
        optimizers = self._named_optimizers().items()
        return {
            **self._model_states(),
            **{name: each.room(saved[name]) if name in saved else {} for name, each in optimizers},
        }

    def try_load(self) -> None:
        for each in self._named_optimizers().values():
            each.try_load()

    def model_state(self, name: str = MODEL) -> dict[str, Any]:
        return model_state(self._at_rest()[name])

    def frozen(self) -> set[str]:
        """Not those of a model that no optimizer trains, such as an average of weights: they change all the same."""
        models, trained = self._at_rest().items(), self._trained_parameters()
        return {
            f"{name}.{each}"
            for name, model in models
            if not trained.isdisjoint(model.parameters())
            for each in frozen_names(model)
        }

    def _trained_parameters(self) -> set[torch.Tensor]:
        optimizers = self._optimizers.values()
        return {each for optimizer in optimizers for group in optimizer.param_groups for each in group["params"]}

    def state_in_use(self) -> dict[str, Any]:
        return self.state()

    def frozen_in_use(self) -> set[str]:
        return self.frozen()

    def changing(self) -> dict[str, dict[str, Any]]:
        return {name: changing_values(model) for name, model in self._models.items()}

    def beside(self) -> Sequence[torch.Tensor]:
        return self._beside

    def load_state(self, state: dict[str, Any]) -> None:
        for name, model in self._at_rest().items():
            load_model_state(model, state[name])
        for name, optimizer in self._named_optimizers().items():
            optimizer.load(state[name])

    def update_average(self, average: nn.Module, source: nn.Module, decay: float) -> None:
        follow(pairs(self._at_rest().values(), average, source), decay)
        copy_buffers(average, source)

    def _model_states(self) -> dict[str, Any]:
        tensors = {name: tensor.detach() for name, tensor in self._tensors.items()}
        return {**{name: model_state(model) for name, model in self._at_rest().items()}, **tensors}

    def _named_optimizers(self) -> dict[str, NamedOptimizer]:
        names = self._names()
        return {name: NamedOptimizer(optimizer, names) for name, optimizer in self._optimizers.items()}

    def _names(self) -> dict[torch.Tensor, str]:
        """The names that parameters had before they were spread."""
        names = {tensor: name for name, tensor in self._tensors.items()}
        for name, model in self._at_rest().items():
            prefix = "" if name == MODEL else f"{name}."
            for of_parameter, parameter in without_wrapper(model).named_parameters():
                names.setdefault(parameter, f"{prefix}{unwrapped(of_parameter)}")
        return names
