"""What is trained is what was trained when the model was prepared; this looks whether it still is."""

from __future__ import annotations

from torch import nn

from spottrain.world.failures import UserError
from spottrain_api.contract import FailureReason


class TrainedParameters:
    """Those of a model, made when an engine has spread it."""

    def __init__(self, model: nn.Module) -> None:
        self._every = [(name, parameter, parameter.requires_grad) for name, parameter in model.named_parameters()]

    def check(self, *, may_freeze: bool) -> None:
        """Raises UserError. What is unfrozen has its gradients averaged by neither DDP nor ZeRO, and in a commit has
        state that a resumed run's optimizer has no place for. What is frozen DDP waits for, and ZeRO goes on with."""
        for name, parameter, was_trained in self._every:
            if parameter.requires_grad != was_trained and not (was_trained and may_freeze):
                change = "frozen" if was_trained else "unfrozen"
                raise UserError(
                    FailureReason.INVALID_CONFIGURATION,
                    f"The parameter {name} was {change} after session.prepare, and a run goes on with what was "
                    "trained then. Leave requires_grad as it is from there on; a learning rate of 0 keeps parameters "
                    "as they are, too.",
                )
