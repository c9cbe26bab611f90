"""How a rank learns that it is to stop: the agent's drain.json or, without an agent, SIGTERM."""

from __future__ import annotations

import math
import signal
import time
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path
from types import FrameType

from spottrain_api.contract import FILE_DRAIN, DrainRequest


class DrainFlag:
    """Whether a drain is to be followed. Asking costs a stat; the flag stays set once it was, of which `on_seen`
    hears."""

    def __init__(
        self,
        run_dir: Path | None,
        *,
        on_seen: Callable[[datetime], None] = lambda at: None,
        now: Callable[[], datetime] = lambda: datetime.now(UTC),
        monotonic: Callable[[], float] = time.monotonic,
    ) -> None:
        self._file = run_dir / FILE_DRAIN if run_dir is not None else None
        self._on_seen = on_seen
        self._now = now
        self._monotonic = monotonic
        self._deadline: tuple[datetime, float] | None = None  # as the request has it, and by the monotonic clock
        self._seen_at: datetime | None = None
        self._is_reported = False

    def catch_sigterm(self) -> None:
        """Take SIGTERM as a request to drain: from torchrun, or from an agent that sends it to any script."""
        signal.signal(signal.SIGTERM, self._on_sigterm)

    def is_set(self, *, last_safe_seconds: float | None = None) -> bool:
        """Whether this rank knows of a request that is due; the other ranks may not yet.

        A preemption is due, if `last_safe_seconds` is given, only when no more than that is left until its
        deadline; until then it may be taken back.
        """
        if self._seen_at is None and self._file is not None and self._file.exists():
            if self._can_wait(last_safe_seconds):
                return False
            self._seen_at = self._now()
        if self._seen_at is not None and not self._is_reported:
            self._is_reported = True
            self._on_seen(self._seen_at)
        return self._seen_at is not None

    def seconds_left(self) -> float:
        """Time until the deadline; infinite where none is known."""
        request = DrainRequest.read(self._file) if self._file is not None else None
        return self._seconds_until(request.deadline) if request is not None else math.inf

    def _can_wait(self, last_safe_seconds: float | None) -> bool:
        if last_safe_seconds is None or self._file is None:
            return False
        request = DrainRequest.read(self._file)
        if request is None:
            return True  # taken back this very moment
        return request.is_preemption and self._seconds_until(request.deadline) > last_safe_seconds

    def _on_sigterm(self, number: int, frame: FrameType | None) -> None:
        self._seen_at = self._seen_at or self._now()

    def _seconds_until(self, deadline: datetime) -> float:
        """The wall clock is asked once, when the deadline is first seen: it may be set while the notice runs."""
        if self._deadline is None or self._deadline[0] != deadline:
            self._deadline = deadline, self._monotonic() + (deadline - self._now()).total_seconds()
        return self._deadline[1] - self._monotonic()
