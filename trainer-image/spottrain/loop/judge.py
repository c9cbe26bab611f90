"""Judging a step before its update, if the job has `stability`."""

from __future__ import annotations

import logging

from spottrain.engines.engine import Engine
from spottrain.loop.stability import StabilityGuard, StepDecision
from spottrain.loop.step import LossMeter
from spottrain.recovery.restorer import StateRestorer
from spottrain.recovery.script_parts import PREFIX
from spottrain.recovery.training_state import STABILITY, TrainingState
from spottrain.world.rank_context import RankContext

logger = logging.getLogger(__name__)


class Judge:
    """Judges the steps of one rank, with the same result on all ranks."""

    def __init__(
        self,
        guard: StabilityGuard,
        *,
        engine: Engine,
        meter: LossMeter,
        context: RankContext,
        restorer: StateRestorer,
    ) -> None:
        """`guard` decides; `meter` has the loss of the step under way."""
        self._guard = guard
        self._engine = engine
        self._meter = meter
        self._agreement = context.agreement
        self._reporter = context.reporter
        self._sleep = context.sleep
        self._restorer = restorer

    def accepts(self, state: TrainingState, step: int) -> bool:
        """Whether the gradients of this step are used. If not, clear them and roll back if the job says so.

        A collective. Raises UserError if the job is to fail.
        """
        is_bad = not self._engine.gradients_are_finite()
        loss, num_bad = self._agreement.total([self._meter.value(), float(is_bad)])
        verdict = self._guard.judge(step, loss, gradients_are_finite=num_bad == 0)
        if verdict is StepDecision.UPDATE:
            return True
        self._engine.discard()
        self._skip_or_roll_back(state, step, verdict)
        return False

    def report(self) -> None:
        """Report what was skipped and rolled back before a resume."""
        self._reporter.update(skipped_steps=self._guard.num_skipped, rollbacks=self._guard.num_rollbacks)

    def _skip_or_roll_back(self, state: TrainingState, step: int, verdict: StepDecision) -> None:
        guard, loaded = self._guard, None
        if verdict is StepDecision.ROLL_BACK:
            # At a drain meanwhile, the newest commit stands: training would go back to it anyway.
            loaded = self._restorer.roll_back(state, sleep=self._sleep)
        if loaded is not None:
            guard.rolled_back(step, loaded.step, loaded.state.get(f"{PREFIX}{STABILITY}"))
            done = f"Training rolled back to the commit at step {loaded.step}, and continues with the next samples."
        else:
            guard.skipped()
            done = "The step was skipped."
        logger.warning("%s %s", guard.reason, done)
        self._reporter.update(
            message=f"{guard.reason} {done}", skipped_steps=guard.num_skipped, rollbacks=guard.num_rollbacks
        )
