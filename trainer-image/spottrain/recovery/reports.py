"""Reports about checkpoints, for the job's status."""

from __future__ import annotations

import logging
from dataclasses import dataclass
from datetime import datetime

from spottrain.checkpoint.errors import CheckpointError, Fenced, StorageUnavailable
from spottrain.checkpoint.format.commits import Commit
from spottrain.checkpoint.peers.replicas import Replicas
from spottrain.checkpoint.saving.save_handle import SaveHandle
from spottrain.recovery.schedule import CheckpointSchedule
from spottrain.world.failures import save_failure
from spottrain.world.progress import ProgressReporter
from spottrain_api.contract.reports import CheckpointTimings, CommitRef, TrainerPhase
from spottrain_runtime.logs import say

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckpointReports:
    """Reports what one rank saved and restored, and what failed.

    Attributes:
        replicas: The replicas in peers' memory, if the job has them.
        uri: Folder of the commits.
    """

    reporter: ProgressReporter
    schedule: CheckpointSchedule
    replicas: Replicas | None = None
    uri: str | None = None

    @property
    def step_seconds(self) -> float | None:
        """How long a step takes, as reported; None before the first step."""
        return self.reporter.step_seconds

    def warn(self, message: str, *, logs: bool = True) -> None:
        """Log a sentence, unless another rank does, and show it as the job's message."""
        if logs:
            logger.warning("%s", message)
        self.reporter.update(message=message)

    def resumed(self, step: int) -> None:
        """Say on the terminal where training continues; for rank 0."""
        say(logger, f"resumed from step {step} of {self.uri}")

    def ended_early(self, step: int, total: int) -> None:
        """Say on the terminal that the script ended before the run's last step; for rank 0."""
        sentence = (
            f"the script ended training at step {step} of {total}, before the last step, as with early stopping"
        )
        say(logger, sentence)

    def failed(self, error: CheckpointError) -> None:
        """Report an error that training survives. The newest commit stands, and the next save comes as planned."""
        report_failure(self.reporter, error)

    def slow(self, step: int, seconds: float, forecast_seconds: float | None) -> None:
        """Report that a save takes far longer than usual. A store that hangs fails late or never."""
        usual = f", and {forecast_seconds:.1f} s were forecast" if forecast_seconds is not None else ""
        self.failed(
            StorageUnavailable(
                f"The checkpoint at step {step} has been under way for {seconds:.0f} s{usual}: the store, or "
                "a rank's connection to it, is slow or hangs. No other save starts before it has ended."
            )
        )

    def stalled(self, seconds: float) -> None:
        """Report how long the start of a background save kept training waiting."""
        self.reporter.note(
            stalled_seconds=self.reporter.progress.stalled_seconds + seconds,
            checkpoint_interval_seconds=self.schedule.interval_seconds(self.step_seconds),
        )

    def saving(self) -> None:
        """Report that training waits for a save."""
        self.reporter.update(phase=TrainerPhase.SAVING)

    def saved(self, handle: SaveHandle, timings: CheckpointTimings, clean_up_failure: str | None) -> None:
        """Report a save that has succeeded, and why older commits stay in the store, if clean-ups fail."""
        self.reporter.update(
            checkpoint=timings,
            checkpoint_interval=self._explain(),
            checkpoint_failure=None,
            clean_up_failure=clean_up_failure,
        )
        if handle.commit is not None:
            self.committed(handle.commit)

    def committed(self, commit: Commit) -> None:
        """Report the newest commit."""
        ref = CommitRef(
            generation=commit.generation,
            step=commit.step,
            manifest=commit.manifest,
            committed_at=datetime.fromisoformat(commit.committed_at),
        )
        self.reporter.update(commit=ref)

    def intervals(self) -> None:
        """Report the intervals of saves, and the reasons for them."""
        if (explained := self._explain()) != self.reporter.progress.checkpoint_interval:
            self.reporter.update(checkpoint_interval=explained)

    def _explain(self) -> str:
        commits = self.schedule.explain()
        return commits if self.replicas is None else f"{commits}; {self.replicas.explain(self.step_seconds)}"


def report_failure(reporter: ProgressReporter, error: CheckpointError) -> None:
    """Report an error that keeps commits from being made or read. Being fenced by a newer generation is not one."""
    if not isinstance(error, Fenced):
        reporter.update(checkpoint_failure=save_failure(error))
