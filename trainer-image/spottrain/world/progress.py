"""What a rank reports to its agent, in small files in the run directory, each replaced atomically."""

from __future__ import annotations

import logging
import math
import threading
import time
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import Any

from spottrain.checkpoint.background import BackgroundThread
from spottrain_api.contract.message import Message
from spottrain_api.contract.names import outcome_file, progress_file
from spottrain_api.contract.reports import Failure, Outcome, OutcomeKind, Progress, TrainerPhase

logger = logging.getLogger(__name__)

# Short steps are not all written: the agent reads the file after each write, and reports far less often.
_MIN_SECONDS_BETWEEN_WRITES = 0.25
_SMOOTHING = 0.2


class ProgressReporter:
    """Keeps this rank's Progress, and writes it to the run directory if there is one.

    A thread writes: between two steps a write would take a millisecond, because the caches hold nothing that it
    needs. If a write fails, as on a full disk, training goes on, and the agent knows what was written last.
    """

    def __init__(
        self,
        run_dir: Path | None,
        *,
        local_rank: int,
        generation: int,
        peak_memory: Callable[[], int] | None = None,
    ) -> None:
        """`peak_memory` measures this rank's, in bytes."""
        self._run_dir = run_dir
        self._local_rank = local_rank
        self._peak_memory = peak_memory
        self._written_at = 0.0
        self._write_failed = False
        self._background = BackgroundThread("progress")
        self._changing = threading.Lock()  # the listener reports, too
        self._made = Progress(generation=generation, updated_at=datetime.now(UTC))
        self._changes: dict[str, Any] = {}  # since it was made
        self._waited_seconds = 0.0
        self._data_wait_seconds: float | None = None
        self._has_stepped = False
        self.step_seconds: float | None = None
        """Running mean of how long a step takes; None before the first."""

    @property
    def progress(self) -> Progress:
        """The newest state. It is made when somebody asks, which is more seldom than it changes."""
        with self._changing:
            if self._changes:
                self._made, self._changes = self._made.model_copy(update=self._changes), {}
            return self._made

    def milestone(self, name: str, at: datetime | None = None) -> None:
        """Record when a part of the start-up was done; by default now."""
        self.update(milestones={**self.progress.milestones, name: at or datetime.now(UTC)})

    def update(self, **changes: Any) -> None:
        """Change fields of Progress, and return when they are written."""
        self.note(**changes)
        self._write().result()

    def step(
        self,
        step: int,
        *,
        seconds: float,
        data_wait_seconds: float,
        tokens: int | None = None,
        samples: int | None = None,
        facts: Callable[[], Mapping[str, Any]] = dict,
    ) -> None:
        """Report a completed step. It is written in the background, unless the last write was a moment ago.

        Args:
            step: Number of the step, from 1.
            seconds: How long it took.
            data_wait_seconds: How much of that this rank waited for data.
            tokens: Tokens of the global batch, if known.
            samples: Its samples, if known.
            facts: Further fields of Progress. It is called if the step is written.
        """
        now = datetime.now(UTC)
        smooth = self.step_seconds = _smoothed(seconds, self.step_seconds)
        self._data_wait_seconds = _smoothed(data_wait_seconds, self._data_wait_seconds)
        if self._has_stepped:
            self._waited_seconds += data_wait_seconds
        else:
            self._has_stepped, self._written_at = True, 0.0
            self.note(first_step_at=now, milestones={**self.progress.milestones, "first_step": now})
        self.note(
            step=step,
            last_step_at=now,
            step_seconds=smooth,
            data_wait_seconds=self._data_wait_seconds,
            waited_seconds=self._waited_seconds,
            tokens_per_second=tokens / smooth if tokens is not None else None,
            samples_per_second=samples / smooth if samples is not None else None,
        )
        if time.monotonic() - self._written_at >= _MIN_SECONDS_BETWEEN_WRITES:
            memory = {} if self._peak_memory is None else {"memory_bytes": self._peak_memory()}
            self.note(**facts(), **memory)
            self._write()

    def note(self, **changes: Any) -> None:
        """Change fields of Progress, which are written with the next step."""
        with self._changing:
            self._changes.update(changes, updated_at=datetime.now(UTC))

    def observe_loss(self, loss: float) -> None:
        """Set the newest mean loss. JSON has no NaN: None stands for it."""
        self.note(loss=loss if math.isfinite(loss) else None)

    def finish(self, kind: OutcomeKind, failure: Failure | None = None) -> None:
        """Write the outcome, then the last progress."""
        outcome = Outcome(
            generation=self.progress.generation,
            kind=kind,
            step=self.progress.step,
            commit=self.progress.commit,
            failure=failure,
        )
        self._write_file(outcome, outcome_file(self._local_rank))
        self.update(phase=TrainerPhase.DONE)

    def _write(self) -> Future[None]:
        self._written_at = time.monotonic()
        return self._background.submit(partial(self._write_file, self.progress, progress_file(self._local_rank)))

    def _write_file(self, message: Message, name: str) -> None:
        if self._run_dir is None:
            return
        try:
            message.write(self._run_dir / name)
        except OSError as error:
            if not self._write_failed:
                logger.warning("Progress is not reported, and training goes on: %s", error)
            self._write_failed = True
        else:
            self._write_failed = False


def _smoothed(newest: float, mean: float | None) -> float:
    return newest if mean is None else _SMOOTHING * newest + (1 - _SMOOTHING) * mean
