"""Saving the state of a run: in the background, at a drain, and after the last step."""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any, TypeVar

from spottrain.checkpoint.checkpointer import Checkpointer
from spottrain.checkpoint.errors import CheckpointError, Fenced, RanksDiffer, UnsupportedState
from spottrain.checkpoint.format import codec
from spottrain.checkpoint.peers.replicas import Replicas
from spottrain.checkpoint.saving.retention import Retention
from spottrain.checkpoint.saving.save_handle import SaveHandle
from spottrain.recovery.interval import CheckpointCost
from spottrain.recovery.reports import CheckpointReports
from spottrain.recovery.schedule import CheckpointSchedule
from spottrain.recovery.store_retries import may_succeed_later, retry
from spottrain.recovery.training_state import CommitContents, TrainingState, what_fits
from spottrain_api.contract.reports import CheckpointTimings
from spottrain_planner.memory_estimate import in_gib

T = TypeVar("T")

logger = logging.getLogger(__name__)

# A save is reported as slow after SLOW_FACTOR times its forecast, but not before SLOW_SECONDS; without a forecast,
# after SLOW_AT_FIRST_SECONDS.
SLOW_FACTOR = 5.0
SLOW_SECONDS = 60.0
SLOW_AT_FIRST_SECONDS = 300.0
# The clean-up at the end of a run, for which all ranks wait, is well below `hangTimeoutSeconds`.
CLEAN_UP_SECONDS = 60.0

IN_PIECES = (
    "This node has no room for a copy of a rank's share of a checkpoint, {}. So it is staged in pieces, and "
    "training waits for the upload of each checkpoint. To avoid that, use nodes with more memory, or more nodes."
)


@dataclass(slots=True)
class _UnderWay:
    """The newest save in the background.

    Attributes:
        forecast_seconds: The forecast that was made before it started.
        is_slow: Whether it was reported as slow.
    """

    handle: SaveHandle
    forecast_seconds: float | None
    is_slow: bool = False


@dataclass(slots=True, kw_only=True)
class StateSaver:
    """Saves one rank's part of a run's state, to the store and to peers' memory.

    `prepare`, `save`, `save_last`, `save_in_background`, `replicate` and `share_failures` are collectives. Without a
    checkpointer nothing is saved.

    Attributes:
        sleep: Waits between two tries of a save without which nothing can continue.
        committed_step: The newest step of which all ranks know that it is committed.
    """

    checkpointer: Checkpointer | None
    schedule: CheckpointSchedule
    reports: CheckpointReports
    retention: Retention
    replicas: Replicas | None = None
    slow_seconds: float = SLOW_SECONDS
    sleep: Callable[[float], None] = time.sleep
    committed_step: int = 0
    _under_way: _UnderWay | None = None

    def prepare(self, state: TrainingState, step: int) -> None:
        """Prepare the first save, which may be the drain's; a collective.

        Call it once a step or a resume has created the optimizer's state. Raises UnsupportedState or RanksDiffer, as
        the save would.
        """
        if self.checkpointer is not None and step > 0:
            self.checkpointer.prepare(
                state.tensors(),
                frozen=state.frozen(),
                extra=self._extra(state),
                alike=state.alike(),
                trial=state.models.try_load,
            )
            if (size := self.checkpointer.pieces_of) is not None:
                self.reports.warn(IN_PIECES.format(in_gib(size)))

    def is_due(self) -> bool:
        """Whether a save is due by this rank's clock."""
        return not self._is_saving() and self.schedule.is_due()

    def forecast_seconds(self) -> float | None:
        """How long a save would take that starts now; None before a cost is known."""
        return self.schedule.forecast_seconds(is_saving=self._is_saving())

    def save_in_background(self, state: TrainingState, step: int) -> None:
        """Start a save. All ranks skip it if the save before is still under way."""
        if self.checkpointer is None:
            return
        cost = self.schedule.cost
        start = partial(self.checkpointer.save_in_background, step=step)
        handle = self._saved_as_far_as_possible(start, state, step)
        if handle is not None:
            self._under_way = _UnderWay(handle, cost.total_seconds if cost is not None else None)
            self.schedule.started()
            self.reports.stalled(handle.staging_seconds)

    def poll(self) -> None:
        """Report the save in the background, if it has ended or is slow. Raises Fenced."""
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
        """Whether this rank's part of the newest save has failed.

        True only while the other ranks do not know it yet.
        """
        return self.checkpointer is not None and self.checkpointer.has_failed

    def share_failures(self) -> None:
        """Make rank 0 give up the newest save if another rank's part of it has failed."""
        if self.checkpointer is not None:
            self.checkpointer.share_failures()

    def save(self, state: CommitContents, step: int, *, seconds_left: float = math.inf) -> None:
        """Save this step, and return when it is committed. Does nothing if it is committed already.

        Args:
            state: What to save.
            step: Steps completed.
            seconds_left: Time until the deadline of a drain.

        Raises:
            CheckpointError: The step is not committed.
        """
        if self.checkpointer is None or step <= self.committed_step:
            return
        self.reports.saving()
        forecast_seconds = self.forecast_seconds()
        deadline = max(seconds_left, 1.0) if seconds_left < math.inf else None
        handle = self._saved_as_far_as_possible(
            partial(self.checkpointer.save, step=step, deadline_seconds=deadline), state, step
        )
        self._saved(handle, forecast_seconds)
        self.committed_step = step

    def save_in_time(self, state: CommitContents, step: int, seconds_left: float) -> CheckpointError | None:
        """As `save`, but only if it can end in time. Returns the error of a save that a later one may mend."""
        try:
            if self.fits(step, seconds_left):
                self.save(state, step, seconds_left=seconds_left)
        except (Fenced, UnsupportedState):  # the next generation would fare no better
            raise
        except CheckpointError as error:
            self.reports.failed(error)
            return error
        return None

    def save_last(self, state: TrainingState, step: int) -> None:
        """Save the last step.

        A store that does not answer is retried, as nothing is left to train meanwhile; the ranks agree on how each
        save ended. Raises CheckpointError.
        """
        retry(lambda: self.save(state, step), when=may_succeed_later, on_error=self.reports.failed, sleep=self.sleep)

    def fits(self, step: int, seconds_left: float) -> bool:
        """Whether a save of `step` can end in time, by the agreed forecast.

        The answer is the same on all ranks. If the save cannot end in time, this waits for the save under way. The
        warning doesn't name the newest commit, because any rank's is shown, and only rank 0 knows the commit.
        """
        if self.checkpointer is None or step <= self.committed_step or self.schedule.fits(seconds_left):
            return True
        self.checkpointer.settle(max(0.0, seconds_left))
        self.poll()
        self.reports.warn(
            f"Step {step} was not committed before the end of this generation: a checkpoint takes about "
            f"{self.schedule.agreed_seconds:.1f} s, and {max(0.0, seconds_left):.1f} s of the notice were left; the "
            "newest commit stands."
        )
        return False

    def is_replica_due(self, step: int) -> bool:
        """Whether to replicate into peers' memory after this step, as this rank sees it."""
        return self.replicas is not None and self.replicas.is_due(step, self.reports.step_seconds)

    def replicate(self, state: TrainingState, step: int) -> None:
        """Start a replica in peers' memory, in the background."""
        if self.replicas is None:
            return
        started = time.monotonic()
        send = partial(self.replicas.replicate, step=step, rank_state=state.rank_state(), started=started)
        tensors, extra = state.tensors(), state.extra()
        try:
            send(tensors, extra=codec.encode(self._with_cost(extra)))
        except UnsupportedState as error:  # as in a commit, which says so
            tensors, extra, change = what_fits(tensors, extra, error)
            if change is None:
                raise
            send(tensors, extra=codec.encode(self._with_cost(extra)))
        self.reports.stalled(time.monotonic() - started)
        self.reports.intervals()

    def clean_up(self) -> None:
        """Delete what `retention` does not keep, for CLEAN_UP_SECONDS.

        An error is only logged: what is left over costs space alone, and the next clean-up finds it.
        """
        if self.checkpointer is None:
            return
        try:
            self.checkpointer.clean_up(self.retention, seconds=CLEAN_UP_SECONDS)
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
            forecast_seconds=forecast_seconds,
        )
        if not handle.writes_frozen_weights:  # the next saves don't
            self.schedule.learn(
                CheckpointCost(stall_seconds=handle.staging_seconds, total_seconds=timings.total_seconds)
            )
        clean_up_failure = self.checkpointer.clean_up_failure if self.checkpointer is not None else None
        self.reports.saved(handle, timings, clean_up_failure)

    def _saved_as_far_as_possible(self, save: Callable[..., T], state: CommitContents, step: int) -> T:
        """Save without what no commit can hold, and say so: better than to lose the step.

        The first update has shown that a commit can hold the state. What has become of it since is the script's.
        """
        rest = {"frozen": state.frozen(), "rank_state": state.rank_state()}
        tensors, extra = state.tensors(), state.extra()
        sentences: list[str] = []
        while True:  # each time with less
            try:
                handle = save(tensors, extra=self._with_cost(extra), alike=state.alike(), **rest)
            except (RanksDiffer, UnsupportedState) as error:
                tensors, extra, change = what_fits(tensors, extra, error)
                if change is None:
                    raise
                sentences.append(f"The checkpoint of step {step} {change}. {error}")
            else:
                if sentences:
                    self.reports.warn(" ".join(sentences))
                return handle

    def _extra(self, state: TrainingState) -> dict[str, Any]:
        return self._with_cost(state.extra())

    def _with_cost(self, extra: dict[str, Any]) -> dict[str, Any]:
        """The state's plain values, and the cost of a save.

        From the cost, the next generation has a forecast before its first save.
        """
        cost = self.schedule.cost
        return {**extra, "checkpoint_cost": asdict(cost) if cost is not None else None}
