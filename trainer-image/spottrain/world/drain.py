"""How a rank learns that it has to stop, and that its node is at risk.

The agent writes drain.json, or the rank gets SIGTERM.
"""

from __future__ import annotations

import math
import os
import signal
import time
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path
from types import FrameType

from spottrain_api.contract.configuration import DrainRequest
from spottrain_api.contract.names import FILE_AT_RISK, FILE_DRAIN


class DrainFlag:
    """Whether this rank has seen a request to drain. Once set, the flag stays set. To ask costs one stat.

    `on_seen` is called once, with the time of the request, when the flag is first found set.
    """

    def __init__(
        self,
        run_dir: Path | None,
        *,
        on_seen: Callable[[datetime], None] = lambda at: None,
        now: Callable[[], datetime] = lambda: datetime.now(UTC),
        monotonic: Callable[[], float] = time.monotonic,
    ) -> None:
        self._file = run_dir / FILE_DRAIN if run_dir is not None else None
        # Strings: pathlib's own code takes longer than a stat.
        self._path = str(self._file) if self._file is not None else None
        self._risk_path = str(run_dir / FILE_AT_RISK) if run_dir is not None else None
        self._on_seen = on_seen
        self._now = now
        self._monotonic = monotonic
        self._deadline: tuple[datetime, float] | None = None  # as in the request, and by the monotonic clock
        self._seen_at: datetime | None = None
        self._is_reported = False
        self._pid = os.getpid()

    def catch_sigterm(self) -> None:
        """Treat SIGTERM as a request to drain.

        torchrun sends it, and so does an agent to a script without a session. A process that the script forks has
        this handler, too, but ends by the signal.
        """
        signal.signal(signal.SIGTERM, self._on_sigterm)

    def is_set(self, *, last_safe_seconds: float | None = None) -> bool:
        """Whether this rank knows of a request that is due.

        The other ranks may not know it yet. If `last_safe_seconds` is given, a preemption is due only when no more
        than that is left until its deadline. Until then it may be withdrawn.
        """
        if self._seen_at is None and self._path is not None and os.path.exists(self._path):
            if self._can_wait(last_safe_seconds):
                return False
            self._seen_at = self._now()
        if self._seen_at is not None and not self._is_reported:
            self._is_reported = True
            self._on_seen(self._seen_at)
        return self._seen_at is not None

    def is_at_risk(self) -> bool:
        """Whether a cloud recommends to leave the node of this rank: a hint, no request. To ask costs one stat."""
        return self._risk_path is not None and os.path.exists(self._risk_path)

    def seconds_left(self) -> float:
        """Seconds until the deadline; infinite if none is known."""
        request = DrainRequest.read(self._file) if self._file is not None else None
        return self._seconds_until(request.deadline) if request is not None else math.inf

    def _can_wait(self, last_safe_seconds: float | None) -> bool:
        if last_safe_seconds is None or self._file is None:
            return False
        request = DrainRequest.read(self._file)
        if request is None:
            return True  # withdrawn at this moment
        return request.is_preemption and self._seconds_until(request.deadline) > last_safe_seconds

    def _on_sigterm(self, number: int, frame: FrameType | None) -> None:
        if os.getpid() != self._pid:
            signal.signal(signal.SIGTERM, signal.SIG_DFL)
            signal.raise_signal(signal.SIGTERM)
        self._seen_at = self._seen_at or self._now()

    def _seconds_until(self, deadline: datetime) -> float:
        """Seconds until a deadline.

        Reads the wall clock only once, when the deadline is first seen, because somebody may set the clock during the
        notice.
        """
        if self._deadline is None or self._deadline[0] != deadline:
            self._deadline = deadline, self._monotonic() + (deadline - self._now()).total_seconds()
        return self._deadline[1] - self._monotonic()
