"""Saving the state of a run: in the background, before a drain ends, and after the last step."""

from __future__ import annotations

import logging
import math
import time
from dataclasses import asdict, dataclass
from typing import Any

from spottrain.checkpoint import Checkpointer, CheckpointError, Fenced, Replicas, Retention, SaveHandle
from spottrain.data import random_state
from spottrain.recovery.interval import CheckpointCost
from spottrain.recovery.reports import CheckpointReports
from spottrain.recovery.schedule import CheckpointSchedule
from spottrain.recovery.store_retries import may_pass, patiently
from spottrain.recovery.training_state import TrainingState
from spottrain_api.contract import CheckpointTimings

logger = logging.getLogger(__name__)

# A save counts as slow, until it ends, after so many times its forecast, and not before so many seconds; if there is
# no forecast, after the last.
SLOW_FACTOR = 5.0
SLOW_SECONDS = 60.0
SLOW_AT_FIRST_SECONDS = 300.0


@dataclass(slots=True)
class _UnderWay:
    """The newest save in the background."""

    handle: SaveHandle
    forecast_seconds: float | None
    """Of before it started."""
    is_slow: bool = False
    """Whether that was reported."""


@dataclass(slots=True, kw_only=True)
class StateSaver:
    """Saves the state of a run, one rank's part of it, to the store and to peers' memory.

    `prepare`, `save`, `save_last`, `save_in_background`, `replicate` and `share_failures` are collectives. Without a
    checkpointer nothing is saved.
    """

    checkpointer: Checkpointer | None
    schedule: CheckpointSchedule
    reports: CheckpointReports
    retention: Retention
    replicas: Replicas | None = None
    slow_seconds: float = SLOW_SECONDS
    committed_step: int = 0
    """The newest step that is known, on all ranks, to be committed."""
    _under_way: _UnderWay | None = None
    _is_prepared: bool = False

    def prepare(self, state: TrainingState, step: int) -> None:
        """Get ready for the first save, which may be the drain's, once a step or a resume has made the optimizer's
        state. A collective the first time; raises UnsupportedState, as the save would."""
        if self.checkpointer is not None and step > 0 and not self._is_prepared:
            self._is_prepared = True
            self.checkpointer.prepare(state.tensors(), frozen=state.frozen())

    def is_due(self) -> bool:
        """Whether a save is due by this rank's clock."""
        return not self._is_saving() and self.schedule.is_due()

    def forecast_seconds(self) -> float | None:
        """How long a save would take that is started now; None before that is known."""
        return self.schedule.forecast_seconds(is_saving=self._is_saving())

    def save_in_background(self, state: TrainingState, step: int) -> None:
        """Start a save; skipped, on all ranks, while the save before is under way."""
        if self.checkpointer is None:
            return
        cost = self.schedule.cost
        handle = self.checkpointer.save_in_background(state.tensors(), step=step, **self._rest(state))
        if handle is not None:
            self._under_way = _UnderWay(handle, cost.total_seconds if cost is not None else None)
            self.schedule.started()

    def poll(self) -> None:
        """Note what became of the save in the background."""
        if self._under_way is None:
            return
        if self._is_saving():
            self._report_if_slow(self._under_way)
            return
        handle, forecast_seconds = self._under_way.handle, self._under_way.forecast_seconds
        self._under_way = None
        if isinstance(handle.error, Fenced):
            raise handle.error
        if handle.error is not None:
            self.reports.failed(handle.error)
            return
        self._saved(handle, forecast_seconds)

    @property
    def has_failed(self) -> bool:
        """Whether this rank's part of the newest save has failed, and the others haven't heard of it yet."""
        return self.checkpointer is not None and self.checkpointer.has_failed

    def share_failures(self) -> None:
        """Let rank 0 give up the newest save if another rank's part of it has failed."""
        if self.checkpointer is not None:
            self.checkpointer.hear_of_failures()

    def save(self, state: TrainingState, step: int, *, seconds_left: float = math.inf) -> None:
        """Save this step, unless it is committed, and return when it is. Raises CheckpointError."""
        if self.checkpointer is None or step <= self.committed_step:
            return
        self.reports.saving()
        forecast_seconds = self.forecast_seconds()
        handle = self.checkpointer.save(
            state.tensors(),
            step=step,
            **self._rest(state),
            deadline_seconds=max(seconds_left, 1.0) if seconds_left < math.inf else None,
        )
        self._saved(handle, forecast_seconds)
        self.committed_step = step

    def save_last(self, state: TrainingState, step: int) -> None:
        """Save the last step. Nothing is left to train meanwhile, so that a store that doesn't answer is waited for;
        the ranks agree on how a save ended. Raises CheckpointError."""
        patiently(lambda: self.save(state, step), may_pass=may_pass, failed=self.reports.failed)

    def fits(self, step: int, seconds_left: float) -> bool:
        """Whether a save of `step` can end in time, by the agreed forecast; the same on all ranks. If it can't, only
        the save under way may still end, and that is waited for."""
        if self.checkpointer is None or step <= self.committed_step or self.schedule.fits(seconds_left):
            return True
        self.checkpointer.settle(max(0.0, seconds_left))
        self.poll()
        newest = self.reports.newest_commit
        which = f", step {newest.step}," if newest is not None else ""
        self.reports.warn(
            f"Step {step} was not committed before the end of this generation: a checkpoint takes about "
            f"{self.schedule.agreed_seconds:.1f} s, and {max(0.0, seconds_left):.1f} s of the notice were left; the "
            f"newest commit{which} stands."
        )
        return False

    def is_replica_due(self, step: int) -> bool:
        """Whether to replicate into peers' memory after this step, as this rank sees it."""
        return self.replicas is not None and self.replicas.is_due(step, self.reports.step_seconds)

    def replicate(self, state: TrainingState, step: int) -> None:
        """Start to replicate into peers' memory in the background."""
        if self.replicas is None:
            return
        started = time.monotonic()
        self.replicas.replicate(
            state.tensors(),
            step=step,
            extra=self._extra(state),
            rank_state=random_state.capture(),
            started=started,
        )
        self.reports.intervals()

    def clean_up(self) -> None:
        """Drop what `retention` doesn't keep. What is left over costs space only, so that an error is no failure."""
        if self.checkpointer is None:
            return
        try:
            self.checkpointer.clean_up(self.retention)
        except CheckpointError as error:
            logger.warning("Old checkpoints could not be deleted: %s", error)

    def _is_saving(self) -> bool:
        return self._under_way is not None and not self._under_way.handle.done

    def _report_if_slow(self, save: _UnderWay) -> None:
        seconds, forecast = self.schedule.seconds_since_start(), save.forecast_seconds
        limit = max(self.slow_seconds, SLOW_FACTOR * forecast) if forecast is not None else SLOW_AT_FIRST_SECONDS
        if not save.is_slow and seconds >= limit:
            save.is_slow = True
            self.reports.slow(save.handle.step, seconds, forecast)

    def _saved(self, handle: SaveHandle, forecast_seconds: float | None) -> None:
        timings = CheckpointTimings(
            staging_seconds=handle.staging_seconds,
            upload_seconds=handle.upload_seconds or 0.0,
            commit_seconds=handle.commit_seconds or 0.0,
            num_bytes=handle.bytes,
            forecast_seconds=forecast_seconds,
        )
        if not handle.writes_frozen_weights:  # the next saves don't
            self.schedule.learn(
                CheckpointCost(stall_seconds=handle.staging_seconds, total_seconds=timings.total_seconds)
            )
        self.reports.saved(handle, timings)

    def _rest(self, state: TrainingState) -> dict[str, Any]:
        """What a save takes beside the tensors."""
        return {
            "frozen": state.frozen(),
            "extra": self._extra(state),
            "rank_state": random_state.capture(),
        }

    def _extra(self, state: TrainingState) -> dict[str, Any]:
        """With the cost, so that the next generation has a forecast before its first save."""
        cost = self.schedule.cost
        return {**state.extra(), "checkpoint_cost": asdict(cost) if cost is not None else None}
