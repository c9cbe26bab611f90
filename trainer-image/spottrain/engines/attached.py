"""Models that somebody else has spread, and optimizers that somebody else steps."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from spottrain.engines.buffers import SharedBuffers
from spottrain.engines.ddp import settle_buckets
from spottrain.engines.gathered import GatheredParameters
from spottrain.engines.model_state import without_wrapper
from spottrain.engines.named_state import MODEL
from spottrain.engines.own_numbers import watch_numbers
from spottrain.engines.sharded_state import ShardedState
from spottrain.engines.step_agreement import StepAgreement
from spottrain.world.failures import UserError


class AttachedModels(ShardedState):
    """Implements Engine for any number of models and optimizers, whose owner calls backward, clips and updates."""

    def __init__(
        self,
        models: Mapping[str, nn.Module],
        optimizers: Mapping[str, Optimizer],
        tensors: Mapping[str, torch.Tensor] | None = None,
    ) -> None:
        """A collective, with the same on all ranks, as they were spread.

        Args:
            models: Models by their names in commits.
            optimizers: Optimizers by their names in commits.
            tensors: Tensors of no model, by their names in commits. Optimizers may train them.
        """
        self._models, self._optimizers, self._tensors = models, optimizers, tensors or {}
        every = _together(models)
        self._buffers, self._gathered = SharedBuffers(every), GatheredParameters(every)
        self._agreement = StepAgreement(self._buffers)
        self._shares_buffers = True
        for optimizer in optimizers.values():
            watch_numbers(optimizer)
            optimizer.register_step_pre_hook(lambda *_: self._require_rest())
        for model in models.values():
            # DDP that finds unused parameters does not rearrange its buckets. DDP with a static graph learns the
            # graph from its first backward pass, which has to be the script's.
            if isinstance(model, DistributedDataParallel) and not (
                model.find_unused_parameters or model.static_graph
            ):
                settle_buckets(model, model.module)
        trained = self._trained_parameters()
        others = [[*model.parameters()] for model in models.values() if trained.isdisjoint(model.parameters())]
        self._beside = [*self._tensors.values(), *(each for parameters in others for each in parameters)]
        self._read()
        self._as_attached: set[torch.Tensor] | None = set(self._read_names)

    def begin_micro_batch(self, *, is_last: bool) -> None:
        """Does nothing: the owner synchronises gradients."""

    def backward(self, loss: Any) -> None:
        """Not called: the owner calls backward."""
        raise RuntimeError("the gradients of this model are computed by its owner; call its own backward")

    def gradients_are_finite(self) -> bool:
        """Always true. The owner checks: gradients may be scaled for fp16, and are then often not finite."""
        return True

    def update(self) -> None:
        """Share the buffers after the owner's update. A collective after the first update, and if there are any.

        They would differ between ranks until DDP's next forward pass, and for ever under FSDP2.
        """
        if self._shares_buffers:
            self._agreement.reach()
            self._buffers.share()
        if self._as_attached is not None:
            self._check_attached(self._as_attached)
            self._as_attached = None
            # Modules have made theirs by now. To ask again would make the ranks wait for each other in each step.
            self._shares_buffers = dist.get_world_size() > 1 and self._buffers.exist()

    def discard(self) -> None:
        """Clear the gradients, so that the owner's update changes nothing."""
        for optimizer in self._optimizers.values():
            optimizer.zero_grad(set_to_none=True)

    def _check_attached(self, as_attached: set[torch.Tensor]) -> None:
        """After the first update, refuse a model that was changed or spread since it was attached."""
        new = next((name for each, name in self._names().items() if each not in as_attached), None)
        if new is not None:
            raise UserError(
                f"the parameter {new} is not one of those that were attached: it was made since, or its model was "
                "spread since. Spread models, and make their optimizers, before session.attach"
            )

    def _require_rest(self) -> None:
        """Refuse an update whose gradients the owner may have clipped or checked without seeing them."""
        if (name := self._gathered.first()) is not None:
            raise UserError(
                f"The model was called between the last backward pass and the optimizer's step, and its parameter "
                f"{name} has been gathered since: what clips or checks gradients in between has not seen them. Call "
                "the model after the step, or set reshard_after_forward of the framework's FSDP plugin to True."
            )


def _together(models: Mapping[str, nn.Module]) -> nn.Module:
    """One module that holds all models, in which the one that is named `model` has its own names."""
    plain: dict[str, Any] = {name: without_wrapper(model) for name, model in models.items()}
    return plain[MODEL] if plain.keys() == {MODEL} else nn.ModuleDict(plain)
