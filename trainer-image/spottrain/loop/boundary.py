"""What the ranks do at the boundary between two steps: they agree, commit, and drain."""

from __future__ import annotations

import logging
import math
from typing import NoReturn

from spottrain.checkpoint.errors import RanksDiffer, UnsupportedState
from spottrain.data.own_data import OwnData
from spottrain.data.rank_data import RankData
from spottrain.loop.step import LossMeter
from spottrain.loop.stopping import Stopping
from spottrain.recovery.recovery import Recovery
from spottrain.recovery.store_retries import may_succeed_later
from spottrain.recovery.training_state import TrainingState
from spottrain.world.failures import Drained, UserError
from spottrain.world.rank_context import RankContext
from spottrain.world.stop_agreement import Ballot, Decision

logger = logging.getLogger(__name__)

ORDERS_DIFFER = (
    "The order of the samples is not the same on all ranks. Let what order= returns depend on the epoch alone, not "
    "on the rank, and give every rank the same data set: the session shares each batch out."
)
SOME_LEFT = (
    "{} left the loop after step {}, and {}. Let all ranks make the same number of steps. If one of them has less "
    "data, or leaves out a step after an exception, the others have to leave it out, too"
)
WAITS = (
    "Rank {} has left the loop after step {}, before the last one, and waits for other ranks. If they are in a step "
    "that it doesn't make, this goes on until runPolicy.hangTimeoutSeconds. Let all ranks make as many steps."
)
# Between tries to save the last step of a drain, in seconds, as far as the deadline allows.
DRAIN_PAUSES = (1.0, 2.0, 4.0, 8.0)


class Boundary:
    """The boundaries of one rank in one generation. Its methods are collectives, and raise Drained."""

    def __init__(
        self,
        state: TrainingState,
        *,
        data: RankData | OwnData,
        context: RankContext,
        recovery: Recovery,
        meter: LossMeter,
        stopping: Stopping,
        is_judged: bool,
    ) -> None:
        """Args as for `Training`; `is_judged`: whether each step is judged before its update."""
        self._state = state
        self._data = data
        self._rank = context.rank
        self._agreement = context.agreement
        self._drain_flag = context.drain
        self._reporter = context.reporter
        self._schedule = recovery.schedule
        self._saver = recovery.saver
        self._reports = recovery.reports
        self._meter = meter
        self._stopping = stopping
        self._is_judged = is_judged
        self._is_tried = self._loss_was_bad = False
        self._left_after: int | None = None

    def begin(self, step: int) -> None:
        """Before the first step: agree on what the ranks know, and wait for it."""
        decision = self._agreement.settle(self._ballot(step))
        if decision.orders_differ:
            raise UserError(ORDERS_DIFFER)
        self._schedule.agreed_seconds = decision.save_seconds
        if decision.drain:
            self._drain(step)

    def cross(self, step: int, *, has_updated: bool, pauses: bool) -> None:
        """After a complete step.

        Args:
            step: Steps completed.
            has_updated: Whether an update was made in this generation.
            pauses: Whether something else comes before the next step, such as an evaluation.
        """
        is_over = self._data.batches.is_over(step)
        decision = self._agreement.read()
        if not is_over:
            self._follow(decision, step, has_updated=has_updated)
        self._agreement.start(self._ballot(step))
        if not is_over:
            self._stopping.completed(step, pauses=pauses)

    def end(self, step: int) -> None:
        """After the last step, or once the script has left the loop. Raises UserError if other ranks go on."""
        decision = self._agreement.read()
        self._require_all_in_loop(decision, left_after=step - 1)
        self._observe_loss(decision, step)
        if not self._data.batches.is_over(step) and self._left_after != step:
            self._left_after = step
            fingerprint = self._data.batches.fingerprint(step)
            decision = self._agreement.settle(
                Ballot(left=True, order=fingerprint),
                on_wait=lambda: self._reports.warn(WAITS.format(self._rank, step)),
            )
            if decision.some_left:
                raise UserError(SOME_LEFT.format(f"rank {self._rank} has", step, "other ranks go on"))

    def _follow(self, decision: Decision, step: int, *, has_updated: bool) -> None:
        """Do what the ranks agreed on at the previous boundary."""
        self._require_all_in_loop(decision, left_after=step - 2)
        if decision.orders_differ:
            raise UserError(ORDERS_DIFFER)
        self._observe_loss(decision, step)
        self._schedule.agreed_seconds = decision.save_seconds
        if decision.at_risk != self._schedule.at_risk:
            self._schedule.at_risk = decision.at_risk
            self._reports.intervals()
        if decision.drain:
            self._drain(step)
        if decision.save_failed:
            self._saver.share_failures()
        if has_updated and not self._is_tried:
            self._prepare_saves(step)
        if decision.commit or self._schedule.is_due_at_step(step):
            self._saver.save_in_background(self._state, step)
        if decision.replicate:
            self._saver.replicate(self._state, step)

    def _require_all_in_loop(self, decision: Decision, *, left_after: int) -> None:
        if decision.some_left:
            raise UserError(SOME_LEFT.format("another rank has", left_after, f"rank {self._rank} has gone on"))

    def _prepare_saves(self, step: int) -> None:
        """Try after the first update what a save would do. Raises UserError for a state that no commit can hold."""
        self._is_tried = True
        try:
            self._saver.prepare(self._state, step)
        except (RanksDiffer, UnsupportedState) as error:
            raise UserError(str(error)) from error

    def _ballot(self, step: int) -> Ballot:
        """This rank's ballot at a step boundary."""
        loss, is_first = self._meter.close_step(), self._rank == 0
        last_safe_seconds = self._schedule.last_safe_seconds(self._reporter.step_seconds)
        return Ballot(
            drain=self._drain_flag.is_set(last_safe_seconds=last_safe_seconds),
            commit=is_first and self._saver.is_due(),
            replicate=is_first and self._saver.is_replica_due(step),
            loss=loss or 0.0,
            has_loss=loss is not None,
            save_seconds=(self._saver.forecast_seconds() or 0.0) if is_first else 0.0,
            save_failed=self._saver.has_failed,
            at_risk=self._drain_flag.is_at_risk(),
            order=self._data.batches.fingerprint(step),
        )

    def _observe_loss(self, decision: Decision, step: int) -> None:
        if decision.loss is None:
            return
        self._reporter.observe_loss(decision.loss)
        if not self._is_judged and not self._loss_was_bad and not math.isfinite(decision.loss):
            self._loss_was_bad = True
            message = (
                f"The loss was {decision.loss} at about step {step}, and steps are not judged: the weights may "
                "be spoilt, and so may commits since then. To leave out such steps, set stability.nonFinite: skip. "
                "If the loss stays so, start afresh in a new job with a different checkpoint.uri."
            )
            logger.warning("%s", message)
            self._reporter.update(message=message)

    def _drain(self, step: int) -> NoReturn:
        """Commit this step if there is time, and end the script. The step is the same on all ranks."""
        self._stopping.stand_down()
        self._reporter.update(step=step)
        # A notice reaches the ranks of one node first: the others may know a different deadline, or none.
        seconds_left = self._agreement.least(self._drain_flag.seconds_left())
        error = self._saver.save_in_time(self._state, step, seconds_left)
        for pause in DRAIN_PAUSES:
            if error is None:
                break
            # Ranks may have met different errors; they retry together, or not at all.
            after = self._drain_flag.seconds_left() - pause if may_succeed_later(error) else 0.0
            seconds_left = self._agreement.least(after)
            if seconds_left <= 0.0:
                break
            self._saver.sleep(pause)
            error = self._saver.save_in_time(self._state, step, seconds_left)
        if error is not None:
            # The newest commit stands, and the outcome names it: the next generation resumes from it.
            logger.warning("Step %d could not be committed before the end of this generation.", step)
        raise Drained
