"""Restoring the state of a run: at the start of a generation, and at a roll-back."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeVar

from spottrain.checkpoint.checkpointer import Checkpointer
from spottrain.checkpoint.errors import CheckpointError, CorruptCheckpoint, StorageUnavailable
from spottrain.checkpoint.format.commits import Commit
from spottrain.checkpoint.loading.loader import Loaded
from spottrain.checkpoint.peers.replicas import Replicas
from spottrain.recovery.interval import CheckpointCost
from spottrain.recovery.reports import CheckpointReports
from spottrain.recovery.saver import StateSaver
from spottrain.recovery.store_retries import retry
from spottrain.recovery.training_state import TrainingState

T = TypeVar("T")

logger = logging.getLogger(__name__)


@dataclass(slots=True, kw_only=True)
class StateRestorer:
    """Restores the state of a run from the newest commit or from peers' memory.

    Its methods are collectives. Without a checkpointer there is nothing to restore.

    Attributes:
        newest: What HEAD named when the generation started, or the commit that was loaded last.
    """

    checkpointer: Checkpointer | None
    newest: Commit | None
    saver: StateSaver
    reports: CheckpointReports
    replicas: Replicas | None = None

    def resume(
        self, state: TrainingState, *, seed: int, rank: int, sleep: Callable[[float], None] = time.sleep
    ) -> int:
        """Load the newest commit into `state`, and return the step to go on from.

        The step is 0 if there is no commit. If the newest commit is damaged, the one before it is loaded. A store
        that does not answer is retried.

        Args:
            state: Where to restore to.
            seed: Seed of the run.
            rank: Number of this rank.
            sleep: Waits so many seconds between two tries.

        Raises:
            CheckpointError: A commit exists, and none can be loaded. To start again from 0 would be worse.
        """
        if self.checkpointer is None:
            return 0
        state.history.begin(state.options())  # loading overwrites them
        self.reports.intervals()
        self._report_rebuilt_head(self.checkpointer)
        if (step := self._resume_from_replicas(self.checkpointer, state, seed=seed, rank=rank)) is not None:
            return step
        if self.newest is None:
            return 0
        checkpointer, newest = self.checkpointer, self.newest
        loaded = self._retried(lambda: self._load(checkpointer, newest, state), sleep)
        self._restore(state, loaded, seed=seed, rank=rank)
        checkpointer.clean_up_in_background()  # only now: nothing is deleted if the commit isn't the job's
        self.saver.committed_step = loaded.step
        self.reports.committed(self.newest)
        return loaded.step

    def roll_back(self, state: TrainingState, *, sleep: Callable[[float], None] = time.sleep) -> Loaded | None:
        """Undo what model and optimizer have learnt since the newest commit.

        Learning rates and random numbers go on. A store that does not answer is retried.

        Args:
            state: Where to restore to.
            sleep: Waits so many seconds between two tries.

        Returns:
            What the commit holds besides tensors; None if there is no commit, and then nothing has changed.

        Raises:
            CheckpointError: No commit can be loaded.
        """
        if self.checkpointer is None:
            return None
        self.checkpointer.settle()  # the save under way may become the newest commit
        checkpointer, rates = self.checkpointer, state.learning_rates()
        loaded = self._retried(lambda: self._load_newest(checkpointer, state), sleep)
        if loaded is None:
            return None
        state.models.load_state(loaded.state)
        state.set_learning_rates(rates)
        return loaded

    def _report_rebuilt_head(self, checkpointer: Checkpointer) -> None:
        if checkpointer.has_rebuilt_head and self.newest is not None:
            damage = (
                "HEAD of the checkpoint store was missing or damaged. It was rebuilt from the checkpoints in the "
                f"store, the newest of step {self.newest.step}."
            )
            self.reports.warn(damage)
            self.reports.failed(CorruptCheckpoint(damage))

    def _resume_from_replicas(
        self, checkpointer: Checkpointer, state: TrainingState, *, seed: int, rank: int
    ) -> int | None:
        """Load the step that the operator found in members' memory.

        Also start to commit it. None if the store is to be read instead: there is no such step, it is not newer than
        HEAD, or it is not complete.
        """
        found = self.replicas.resume if self.replicas is not None else None
        if self.replicas is None or found is None:
            return None
        newest = self.newest
        if newest is not None and (found.step <= newest.step or found.generation < newest.generation):
            return None
        try:
            loaded = checkpointer.load_replica(
                state.room, self.replicas, found, frozen=state.frozen(), ranks=state.ranks
            )
        except CheckpointError as error:
            if newest is None:  # some tensors may be filled already, and there is no commit to fill them from
                raise StorageUnavailable(
                    f"Step {found.step} could not be read from members' memory, and none is committed. {error}"
                ) from error
            self.reports.warn(
                f"Step {found.step} could not be read from members' memory; training continues from step "
                f"{newest.step}, which is committed. {error}"
            )
            return None
        self._restore(state, loaded, seed=seed, rank=rank)
        self.saver.save_in_background(state, loaded.step)
        return loaded.step

    def _restore(self, state: TrainingState, loaded: Loaded, *, seed: int, rank: int) -> None:
        state.check(loaded.extra, loaded.step)
        state.restore(loaded, seed=seed, rank=rank)
        changes = list(state.changes(loaded))
        if changes:  # one message: the next would replace it
            self.reports.warn(" ".join(changes), logs=rank == 0)
        if (cost := loaded.extra.get("checkpoint_cost")) is not None:
            self.saver.schedule.cost = CheckpointCost(**cost)
        self.reports.intervals()

    def _retried(self, work: Callable[[], T], sleep: Callable[[float], None]) -> T:
        """Do `work`, which reads the store, and retry it if the store does not answer."""
        return retry(
            work,
            when=lambda error: isinstance(error, StorageUnavailable),
            on_error=self.reports.failed,
            sleep=sleep,
        )

    def _load_newest(self, checkpointer: Checkpointer, state: TrainingState) -> Loaded | None:
        """As `_load`, of the commit that HEAD names now; None without one."""
        self.newest = checkpointer.latest()
        return self._load(checkpointer, self.newest, state) if self.newest is not None else None

    def _load(self, checkpointer: Checkpointer, newest: Commit, state: TrainingState) -> Loaded:
        """The newest commit that is not damaged; `newest` is set to it."""
        room, frozen = state.room, state.frozen()
        try:
            return checkpointer.load(room, newest, frozen=frozen, ranks=state.ranks)
        except CorruptCheckpoint as error:
            logger.warning("%s Looking for an older commit that is not damaged.", error)
            self.newest = checkpointer.latest(verify=True)
            if self.newest is None:
                raise
            loaded = checkpointer.load(room, self.newest, frozen=frozen, ranks=state.ranks)
            self.reports.warn(
                f"The checkpoint at step {newest.step} is damaged, and training continues from the one before it, "
                f"step {loaded.step}. {error}"
            )
            self.reports.failed(error)
            return loaded
