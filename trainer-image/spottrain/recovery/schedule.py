"""When and how the loop saves and restores the state of a run."""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from datetime import datetime
from typing import Any

from spottrain.checkpoint import (
    Checkpointer,
    CheckpointError,
    Commit,
    CorruptCheckpoint,
    Fenced,
    Loaded,
    Replicas,
    Retention,
    SaveHandle,
    StorageUnavailable,
)
from spottrain.data import random_state
from spottrain.recovery.interval import CheckpointCost, CommitInterval
from spottrain.recovery.store_retries import PAUSES, may_pass, patiently
from spottrain.recovery.training_state import TrainingState
from spottrain.world.failures import save_failure
from spottrain.world.progress import ProgressReporter
from spottrain_api.contract import CheckpointTimings, CommitRef, TrainerPhase

logger = logging.getLogger(__name__)

# How much longer than forecast a save may take that is begun at the last safe moment; and how many steps pass
# from a rank's ballot until the ranks stop, with one for good measure.
SAFETY_FACTOR = 1.5
SAFETY_SECONDS = 1.0
BALLOT_STEPS = 3
# A save counts as slow, until it ends, after so many times its forecast, and not before so many seconds; where there
# is no forecast, after the last.
SLOW_FACTOR = 5.0
SLOW_SECONDS = 60.0
SLOW_AT_FIRST_SECONDS = 300.0


@dataclass(slots=True, kw_only=True)
class CheckpointSchedule:
    """Commits of one generation. `checkpointer` None: nothing is saved.

    `resume`, `prepare`, `save` and `commit` are collectives.
    """

    checkpointer: Checkpointer | None
    newest: Commit | None  # what HEAD named when the generation started
    interval: CommitInterval
    retention: Retention
    reporter: ProgressReporter
    replicas: Replicas | None = None  # in peers' memory
    waits_for_last_safe_moment: bool = False  # checkpoint.onNotice: lastSafe
    pauses: tuple[float, ...] = PAUSES
    slow_seconds: float = SLOW_SECONDS
    committed_step: int = 0
    agreed_seconds: float | None = None  # rank 0's forecast, as all ranks have heard it
    _cost: CheckpointCost | None = None
    _last_at: float = field(default_factory=time.monotonic)
    _handle: SaveHandle | None = None
    _forecast: float | None = None  # of the newest save, made before it began
    _is_slow: bool = False  # the newest save; it was told
    _is_prepared: bool = False  # for the first save

    def resume(
        self, state: TrainingState, *, seed: int, rank: int, sleep: Callable[[float], None] = time.sleep
    ) -> int:
        """Load the newest commit into `state`; the step to go on from, 0 where there is no commit.

        A commit that turns out to be damaged is passed over for the kept one before it; a store that doesn't answer
        is waited for with `sleep`. Raises CheckpointError where a commit exists and none can be loaded: to start
        again from 0 would be worse.
        """
        self.reporter.update(checkpoint_interval=self._explain() if self.checkpointer else None)
        if self.checkpointer is None:
            return 0
        if self.checkpointer.has_rebuilt_head and self.newest is not None:
            damage = (
                "HEAD of the checkpoint store was missing or damaged. It was made anew from the checkpoints that lie "
                f"there, the newest of step {self.newest.step}."
            )
            self._say(damage)
            self.failed(CorruptCheckpoint(damage))
        if (step := self._resume_from_memory(state, seed=seed, rank=rank)) is not None:
            return step
        if self.newest is None:
            return 0
        tensors, loaded = self._load(self.checkpointer, self.newest, state, sleep)
        self._restore(state, tensors, loaded, seed=seed, rank=rank)
        self.committed_step = loaded.step
        self.reporter.committed(reference(self.newest))
        return loaded.step

    def _resume_from_memory(self, state: TrainingState, *, seed: int, rank: int) -> int | None:
        """Load the step that the operator found in members' memory, and begin to commit it; None where there is
        none, or nothing newer than HEAD, or it is not whole, so that the store is to be read."""
        found = self.replicas.resume if self.replicas is not None else None
        if self.checkpointer is None or self.replicas is None or found is None:
            return None
        newest = self.newest
        if newest is not None and (found.step <= newest.step or found.generation < newest.generation):
            return None
        tensors = state.tensors()
        try:
            loaded = self.checkpointer.load_replica(tensors, self.replicas, found, frozen=state.frozen())
        except CheckpointError as error:
            if newest is None:  # some tensors may be filled already, and nothing else is there to fill them
                raise StorageUnavailable(
                    f"Step {found.step} could not be read from members' memory, and none is committed. {error}"
                ) from error
            self._say(
                f"Step {found.step} could not be read from members' memory; training goes on from {newest.step}, "
                f"which is committed. {error}"
            )
            return None
        self._restore(state, tensors, loaded, seed=seed, rank=rank)
        self.save(state, loaded.step)
        return loaded.step

    def _restore(
        self, state: TrainingState, tensors: dict[str, Any], loaded: Loaded, *, seed: int, rank: int
    ) -> None:
        state.check(loaded.extra, loaded.step)
        for change in state.changes(loaded):
            self._say(change)
        state.restore(tensors, loaded, seed=seed, rank=rank)
        if (cost := loaded.extra.get("checkpoint_cost")) is not None:
            self._cost = CheckpointCost(**cost)
        self.reporter.update(checkpoint_interval=self._explain())

    def prepare(self, state: TrainingState, step: int) -> None:
        """Get ready for the first save, which may be the drain's, once a step or a resume has made the optimizer's
        state. A collective the first time; raises UnsupportedState, as the save would."""
        if self.checkpointer is not None and step > 0 and not self._is_prepared:
            self._is_prepared = True
            self.checkpointer.prepare(state.tensors(), frozen=state.frozen())

    def is_replica_due(self, step: int) -> bool:
        """Whether to replicate into peers' memory after this step, as this rank sees it."""
        return self.replicas is not None and self.replicas.is_due(step, self.reporter.progress.step_seconds)

    def replicate(self, state: TrainingState, step: int) -> None:
        """Begin to replicate into peers' memory in the background."""
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
        if (explained := self._explain()) != self.reporter.progress.checkpoint_interval:
            self.reporter.update(checkpoint_interval=explained)

    def roll_back(self, state: TrainingState) -> Loaded | None:
        """Undo what model and optimizer have learnt since the newest commit; None, with nothing done, where there is
        none. Learning rates and random numbers go on. A collective; raises CheckpointError."""
        if self.checkpointer is None:
            return None
        self.checkpointer.settle()  # the save under way may become the newest commit
        self.newest = self.checkpointer.latest()
        if self.newest is None:
            return None
        rates = state.learning_rates()
        tensors, loaded = self._load(self.checkpointer, self.newest, state)
        state.engine.load_state(tensors)
        state.set_learning_rates(rates)
        return loaded

    def is_due(self) -> bool:
        """Whether a commit is due by this rank's clock."""
        idle = self._handle is None or self._handle.done
        return idle and self.interval.due_after(time.monotonic() - self._last_at, self._cost)

    def save(self, state: TrainingState, step: int) -> None:
        """Begin to save in the background; skipped, on all ranks, while the save before is under way."""
        if self.checkpointer is None:
            return
        self._forecast = self._cost.total_seconds if self._cost is not None else None
        handle = self.checkpointer.save_in_background(
            state.tensors(),
            step=step,
            frozen=state.frozen(),
            extra=self._extra(state),
            rank_state=random_state.capture(),
        )
        if handle is not None:
            self._handle = handle
            self._last_at = time.monotonic()
            self._is_slow = False

    def poll(self) -> None:
        """Note what became of the save in the background."""
        if self._handle is None:
            return
        if not self._handle.done:
            self._tell_if_slow(self._handle)
            return
        handle, self._handle = self._handle, None
        if isinstance(handle.error, Fenced):
            raise handle.error
        if handle.error is not None:
            self.failed(handle.error)
            return
        self._note(handle)

    @property
    def has_failed(self) -> bool:
        """Whether this rank's part of the newest save has failed, and the others haven't heard of it yet."""
        return self.checkpointer is not None and self.checkpointer.has_failed

    def hear_of_failures(self) -> None:
        """Where a rank's part of the newest save has failed: rank 0 gives the save up. A collective."""
        if self.checkpointer is not None:
            self.checkpointer.hear_of_failures()

    def failed(self, error: CheckpointError) -> None:
        """Report an error that training survives: the newest commit stands, and the next save is tried as planned."""
        report_failure(self.reporter, error)

    def commit_last(self, state: TrainingState, step: int) -> None:
        """Commit the last step. Nothing is left to train meanwhile, so that a store that doesn't answer is waited
        for; the ranks agree on how a save ended. Raises CheckpointError."""
        patiently(lambda: self.commit(state, step), may_pass=may_pass, failed=self.failed, pauses=self.pauses)

    def commit(self, state: TrainingState, step: int, *, seconds_left: float = math.inf) -> None:
        """Commit this step, unless that was done, and return when it is. Raises CheckpointError."""
        if self.checkpointer is None or step <= self.committed_step:
            return
        self.reporter.update(phase=TrainerPhase.SAVING)
        self._forecast = self.forecast_seconds()
        handle = self.checkpointer.save(
            state.tensors(),
            step=step,
            frozen=state.frozen(),
            extra=self._extra(state),
            rank_state=random_state.capture(),
            deadline_seconds=max(seconds_left, 1.0) if seconds_left < math.inf else None,
        )
        self._note(handle)
        self.committed_step = step

    def forecast_seconds(self) -> float | None:
        """How long a commit would take if it were begun now, after the save under way; None where that isn't
        known. Of rank 0, whose saves end when all ranks' do."""
        if self._cost is None:
            return None
        total = self._cost.total_seconds
        if self._handle is None or self._handle.done:
            return total
        return total + max(0.0, total - (time.monotonic() - self._last_at))

    def last_safe_seconds(self, step_seconds: float | None) -> float | None:
        """How long before a deadline the ranks have to agree on the last commit; None: at once."""
        if not self.waits_for_last_safe_moment or self.agreed_seconds is None or step_seconds is None:
            return None
        return SAFETY_FACTOR * self.agreed_seconds + BALLOT_STEPS * step_seconds + SAFETY_SECONDS

    def fits(self, step: int, seconds_left: float) -> bool:
        """Whether a commit of `step` can be done in time, by the agreed forecast; the same on all ranks.

        Where it can't, nothing is begun: only the save under way may still end.
        """
        needed = self.agreed_seconds
        if self.checkpointer is None or needed is None or needed <= seconds_left or step <= self.committed_step:
            return True
        self.checkpointer.settle(max(0.0, seconds_left))
        self.poll()
        newest = self.reporter.progress.commit
        which = f", step {newest.step}," if newest is not None else ""  # only rank 0 hears of those in the background
        self._say(
            f"Step {step} was not committed before the end of this generation: a checkpoint takes about "
            f"{needed:.1f} s, and {max(0.0, seconds_left):.1f} s of the notice were left; the newest commit{which} "
            "stands."
        )
        return False

    def clean_up(self) -> None:
        """Drop what `retention` doesn't keep. What is left over costs space only, so that an error is no failure."""
        if self.checkpointer is None:
            return
        try:
            self.checkpointer.clean_up(self.retention)
        except CheckpointError as error:
            logger.warning("Old checkpoints could not be deleted: %s", error)

    def _load(
        self,
        checkpointer: Checkpointer,
        newest: Commit,
        state: TrainingState,
        sleep: Callable[[float], None] = time.sleep,
    ) -> tuple[dict[str, Any], Loaded]:
        """The tensors of the newest commit that is whole; `newest` is set to it. A store that doesn't answer is
        waited for."""
        return patiently(
            lambda: self._load_whole(checkpointer, newest, state),
            may_pass=lambda error: isinstance(error, StorageUnavailable),
            failed=self.failed,
            pauses=self.pauses,
            sleep=sleep,
        )

    def _load_whole(
        self, checkpointer: Checkpointer, newest: Commit, state: TrainingState
    ) -> tuple[dict[str, Any], Loaded]:
        tensors = state.tensors()
        try:
            return tensors, checkpointer.load(tensors, newest, frozen=state.frozen())
        except CorruptCheckpoint as error:
            logger.warning("%s Looking for an older commit that is whole.", error)
            self.newest = checkpointer.latest(verify=True)
            if self.newest is None:
                raise
            loaded = checkpointer.load(tensors, self.newest, frozen=state.frozen())
            self._say(
                f"The checkpoint at step {newest.step} is damaged, and training went on from the one before it, "
                f"step {loaded.step}. {error}"
            )
            self.failed(error)
            return tensors, loaded

    def _extra(self, state: TrainingState) -> dict[str, Any]:
        """With the cost, so that the next generation has a forecast before its first save."""
        return {**state.extra(), "checkpoint_cost": asdict(self._cost) if self._cost is not None else None}

    def _explain(self) -> str:
        """How often is saved where, and why so, for the status."""
        commits = self.interval.explain(self._cost)
        if self.replicas is None:
            return commits
        return f"{commits}; {self.replicas.explain(self.reporter.progress.step_seconds)}"

    def _say(self, message: str) -> None:
        logger.warning("%s", message)
        self.reporter.update(message=message)

    def _tell_if_slow(self, handle: SaveHandle) -> None:
        """A store that hangs fails late or never, and no other save begins meanwhile."""
        seconds, forecast = time.monotonic() - self._last_at, self._forecast
        patience = max(self.slow_seconds, SLOW_FACTOR * forecast) if forecast is not None else SLOW_AT_FIRST_SECONDS
        if self._is_slow or seconds < patience:
            return
        self._is_slow = True
        usual = f", where {forecast:.1f} s were forecast" if forecast is not None else ""
        self.failed(
            StorageUnavailable(
                f"The checkpoint at step {handle.step} has been under way for {seconds:.0f} s{usual}: the store, or "
                "a rank's way to it, is slow or hangs. No other save begins before it has ended."
            )
        )

    def _note(self, handle: SaveHandle) -> None:
        timings = CheckpointTimings(
            staging_seconds=handle.staging_seconds,
            upload_seconds=handle.upload_seconds or 0.0,
            commit_seconds=handle.commit_seconds or 0.0,
            num_bytes=handle.bytes,
            forecast_seconds=self._forecast,
        )
        newest = CheckpointCost(stall_seconds=handle.staging_seconds, total_seconds=timings.total_seconds)
        if not handle.writes_frozen_weights:  # the next saves don't
            self._cost = newest if self._cost is None else self._cost.updated(newest)
        interval = self._explain()
        self.reporter.update(checkpoint=timings, checkpoint_interval=interval, checkpoint_failure=None)
        if handle.commit is not None:
            self.reporter.committed(reference(handle.commit))


def report_failure(reporter: ProgressReporter, error: CheckpointError) -> None:
    """Report what keeps commits from being made or read. That a newer generation has taken over does not."""
    if not isinstance(error, Fenced):
        reporter.update(checkpoint_failure=save_failure(error))


def reference(commit: Commit) -> CommitRef:
    """A commit as the contract's messages name it."""
    return CommitRef(
        generation=commit.generation,
        step=commit.step,
        manifest=commit.manifest,
        committed_at=datetime.fromisoformat(commit.committed_at),
    )
