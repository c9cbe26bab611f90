"""Steps that would spoil the model.

Their loss is not finite, or much larger than the losses before. A step is judged when its gradients are known and not
used yet, from the mean loss over all ranks. So all ranks take the same decision on the same step, and no commit holds
an update that was judged bad. The loss is needed at once, which costs one small reduction a step, and only if the job
has `stability`.

A skipped step makes no update. A roll-back also undoes the steps since the newest commit, because the cause of a loss
spike often lies some steps before it (Chowdhery et al., "PaLM", 2022, section 5.1). In both cases the run continues
with the next samples and the next learning rate, and no sample is used twice.
"""

from __future__ import annotations

import math
import statistics
from collections import deque
from enum import StrEnum
from typing import Any

from spottrain.world.failures import UserError
from spottrain_api.contract.reports import FailureReason
from spottrain_api.settings.choices import StabilityAction
from spottrain_api.settings.stability import StabilityConfig

# After so many skipped steps in a row, the model itself is broken.
MAX_SKIPPED_IN_A_ROW = 10


class StepDecision(StrEnum):
    """What to do with a step."""

    UPDATE = "update"
    SKIP = "skip"
    ROLL_BACK = "rollBack"


class StabilityGuard:
    """Judges each step by the losses of the steps before. Implements Stateful; the same on all ranks."""

    def __init__(self, config: StabilityConfig) -> None:
        self._config = config
        spike = config.loss_spike
        self._window: deque[float] = deque(maxlen=spike.window if spike is not None else 0)
        self._num_in_a_row = 0
        self._rolled_back_to = (0, 0)  # number of updates in that model, and of roll-backs to it
        self.num_skipped = 0
        """Steps of the run that have no part in the model."""
        self.num_rollbacks = 0
        self.reason = ""
        """What was wrong with the newest bad step, as a sentence."""
        self._field = ""  # of the job's spec, which says what to do about that step

    def judge(self, step: int, loss: float, *, gradients_are_finite: bool = True) -> StepDecision:
        """What to do with a step of this mean loss. Raises UserError if the job is to fail."""
        action = self._action(step, loss, gradients_are_finite)
        if action is None:
            self._num_in_a_row = 0
            self._window.append(loss)
            return StepDecision.UPDATE
        if action is StabilityAction.FAIL:
            raise _unstable(f"{self.reason} Lower the learning rate, clip gradients, or set {self._field} to skip.")
        self._num_in_a_row += 1
        if self._num_in_a_row > MAX_SKIPPED_IN_A_ROW:
            raise _unstable(
                f"{self.reason} The {MAX_SKIPPED_IN_A_ROW} steps before it were skipped, too. Lower the learning "
                "rate, or look at the data around that step."
            )
        return StepDecision.SKIP if action is StabilityAction.SKIP else StepDecision.ROLL_BACK

    def skipped(self) -> None:
        """Note that a step made no update."""
        self.num_skipped += 1

    def rolled_back(self, step: int, commit_step: int, committed: dict[str, Any] | None) -> None:
        """Note a roll-back.

        Args:
            step: The newest step that is undone.
            commit_step: The commit to which training went back.
            committed: This guard's state in that commit; None if steps were not judged then.

        Raises:
            UserError: Training went back to the same model too often, also if by a different commit.
        """
        num_skipped = committed["skipped"] if committed is not None else 0
        num_updates = commit_step - num_skipped
        before, times = self._rolled_back_to
        times = times + 1 if before == num_updates else 1
        if times > self._config.max_rollbacks:
            raise _unstable(
                f"{self.reason} Training rolled back to the model of step {commit_step} {times - 1} times already, "
                "which is stability.maxRollbacks. Lower the learning rate, or look at the data around that step."
            )
        self._rolled_back_to = num_updates, times
        self.num_rollbacks += 1
        self.num_skipped = num_skipped + step - commit_step

    def state_dict(self) -> dict[str, Any]:
        return {
            "window": list(self._window),
            "in_a_row": self._num_in_a_row,
            "rolled_back_to": self._rolled_back_to,
            "skipped": self.num_skipped,
            "rollbacks": self.num_rollbacks,
        }

    def load_state_dict(self, state_dict: dict[str, Any], /) -> None:
        self._window.clear()
        self._window.extend(state_dict["window"])
        self._num_in_a_row = state_dict["in_a_row"]
        self._rolled_back_to = state_dict["rolled_back_to"]
        self.num_skipped = state_dict["skipped"]
        self.num_rollbacks = state_dict["rollbacks"]

    def _action(self, step: int, loss: float, gradients_are_finite: bool) -> StabilityAction | None:
        """None if nothing is wrong."""
        self._field = "stability.nonFinite"
        if not math.isfinite(loss):
            self.reason = f"The loss of step {step} is {loss}."
            return self._config.non_finite
        if not gradients_are_finite:
            self.reason = f"The gradient of step {step} is not finite, at a loss of {loss:.4g}."
            return self._config.non_finite
        spike = self._config.loss_spike
        if spike is None or len(self._window) < spike.window:
            return None
        usual = statistics.median(self._window)
        # For positive losses, factor times the median. Losses may be negative, or change their sign.
        limit = usual + (spike.factor - 1) * statistics.median(map(abs, self._window))
        if loss <= limit:
            return None
        self._field = "stability.lossSpike.action"
        self.reason = (
            f"The loss of step {step} is {loss:.4g}, above {limit:.4g}, the limit by stability.lossSpike.factor "
            f"{spike.factor:g} and the median {usual:.4g} of the {spike.window} steps before."
        )
        return spike.action


def _unstable(message: str) -> UserError:
    return UserError(message, FailureReason.TRAINING_UNSTABLE)
