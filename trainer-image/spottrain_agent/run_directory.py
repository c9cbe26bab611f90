"""A generation's run directory: what the agent writes there, and what it reads from its ranks."""

from __future__ import annotations

import contextlib
import json
import re
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any, TypeVar

from pydantic import ValidationError

from spottrain_agent.records import (
    FILE_LAUNCHER,
    LauncherEnded,
    WorkerEnded,
    WorkerStarted,
    worker_ended_file,
    worker_started_file,
)
from spottrain_api.contract.configuration import DrainRequest
from spottrain_api.contract.message import Message
from spottrain_api.contract.names import FILE_AT_RISK, FILE_DRAIN, FILE_RUN, outcome_file, progress_file
from spottrain_api.contract.reports import Outcome, Progress

_NAME = re.compile(r"g(\d+)")
_M = TypeVar("_M", bound=Message)
# Number of run directories to keep, including the current one, for people who look into a pod afterwards.
NUM_KEPT = 3


def newest_generation(root: Path) -> int:
    """The highest generation that was ever started under `root`; 0 for none."""
    return max((number for number, _ in _generations(root)), default=0)


def _generations(root: Path) -> list[tuple[int, Path]]:
    if not root.is_dir():
        return []
    matches = ((_NAME.fullmatch(path.name), path) for path in root.iterdir())
    return sorted((int(match[1]), path) for match, path in matches if match)


class RunDirectory:
    """The folder `<root>/g<generation>`. A file is read again only after it has changed."""

    def __init__(self, root: Path, generation: int) -> None:
        self.root = root
        self.path = root / f"g{generation}"
        self.generation = generation
        self._read: dict[Path, tuple[tuple[int, int], Message | None]] = {}

    def create(self, config: Mapping[str, Any]) -> None:
        """Create it with only run.json, and drop the oldest run directories. run.json is a TrainerConfig."""
        shutil.rmtree(self.path, ignore_errors=True)
        self.path.mkdir(parents=True)
        (self.path / FILE_RUN).write_text(json.dumps(config))
        for _, old in _generations(self.root)[:-NUM_KEPT]:
            shutil.rmtree(old, ignore_errors=True)

    @property
    def drain_file(self) -> Path:
        return self.path / FILE_DRAIN

    def write_drain(self, request: DrainRequest) -> None:
        request.write(self.drain_file)

    def remove_drain(self) -> None:
        self.drain_file.unlink(missing_ok=True)

    def show_risk(self, at_risk: bool) -> None:
        """Show the ranks whether a cloud recommends to leave the node."""
        if at_risk:
            (self.path / FILE_AT_RISK).touch()
        else:
            (self.path / FILE_AT_RISK).unlink(missing_ok=True)

    def progress(self, local_rank: int) -> Progress | None:
        progress = self._message(progress_file(local_rank), Progress)
        return progress if progress and progress.generation == self.generation else None

    def outcome(self, local_rank: int) -> Outcome | None:
        outcome = self._message(outcome_file(local_rank), Outcome)
        return outcome if outcome and outcome.generation == self.generation else None

    def worker_started(self, local_rank: int) -> WorkerStarted | None:
        return self._message(worker_started_file(local_rank), WorkerStarted)

    def worker_ended(self, local_rank: int) -> WorkerEnded | None:
        return self._message(worker_ended_file(local_rank), WorkerEnded)

    def launcher_ended(self) -> LauncherEnded | None:
        return self._message(FILE_LAUNCHER, LauncherEnded)

    def _message(self, name: str, kind: type[_M]) -> _M | None:
        path = self.path / name
        try:
            stat = path.stat()
        except FileNotFoundError:
            return None
        version = (stat.st_mtime_ns, stat.st_ino)
        cached = self._read.get(path)
        if cached is None or cached[0] != version:
            message: _M | None = None
            # The user's processes write these files: one that can't be read counts as missing.
            try:
                with contextlib.suppress(ValidationError):
                    message = kind.read(path)
            except OSError:  # it may be read later, if no file descriptor was free
                return None
            cached = (version, message)
            self._read[path] = cached
        return cached[1] if isinstance(cached[1], kind) else None
