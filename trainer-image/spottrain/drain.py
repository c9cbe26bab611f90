"""How a rank learns that it is to stop: the agent's drain.json or, without an agent, SIGTERM."""

from __future__ import annotations

import signal
from datetime import UTC, datetime
from pathlib import Path
from types import FrameType

from spottrain_api.contract import FILE_DRAIN, DrainRequest


class DrainFlag:
    """Whether a drain was asked for. Asking costs a stat; the flag stays set once it was seen."""

    def __init__(self, run_dir: Path | None) -> None:
        self._file = run_dir / FILE_DRAIN if run_dir is not None else None
        self.seen_at: datetime | None = None

    def catch_sigterm(self) -> None:
        """Take SIGTERM as a request to drain: from torchrun, or from an agent that sends it to any script."""
        signal.signal(signal.SIGTERM, self._on_sigterm)

    def is_set(self) -> bool:
        """Whether this rank knows of a request; the other ranks may not yet."""
        if self.seen_at is None and self._file is not None and self._file.exists():
            self.seen_at = datetime.now(UTC)
        return self.seen_at is not None

    def seconds_left(self) -> float | None:
        """Time until the deadline, None where none is known."""
        request = DrainRequest.read(self._file) if self._file is not None else None
        return (request.deadline - datetime.now(UTC)).total_seconds() if request is not None else None

    def _on_sigterm(self, number: int, frame: FrameType | None) -> None:
        self.seen_at = self.seen_at or datetime.now(UTC)
