"""A check that a run trains the same parameters throughout."""

from __future__ import annotations

from torch import nn

from spottrain.world.failures import UserError


class TrainedParameters:
    """Which parameters of a model were trained when an engine spread it."""

    def __init__(self, model: nn.Module) -> None:
        self._every = [(name, parameter, parameter.requires_grad) for name, parameter in model.named_parameters()]

    def check(self, *, may_freeze: bool) -> None:
        """Raise UserError if requires_grad has changed since.

        Neither DDP nor ZeRO averages the gradients of an unfrozen parameter, and a resumed run's optimizer has no
        place for its state. DDP waits for a frozen parameter, and ZeRO goes on training it.
        """
        for name, parameter, was_trained in self._every:
            if parameter.requires_grad != was_trained and not (was_trained and may_freeze):
                change = "frozen" if was_trained else "unfrozen"
                raise UserError(
                    f"The parameter {name} was {change} after session.prepare, and a run trains the same parameters "
                    "throughout. Do not change requires_grad after session.prepare; a learning rate of 0 keeps "
                    "parameters as they are, too."
                )
