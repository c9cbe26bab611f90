"""A job of plain processes on this machine: how it starts, is hurt, and ends."""

from __future__ import annotations

import os
import signal
import subprocess
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

import psutil

from benchmarks.recovery.model import NUM_NODES
from benchmarks.recovery.outcome import PATIENCE_SECONDS, WARM_STEPS, CompletedStep, Outcome, outcome_of, read_steps

HERE = Path(__file__).parent
LOCAL_ADDRESS = "127.0.0.1"
Command = Sequence[str]


class Job:
    """Processes that train together.

    `members` are one process for each node. `services` are what they can't do without, and are never hurt.
    """

    def __init__(
        self,
        folder: Path,
        *,
        members: Sequence[Command],
        services: Sequence[Command] = (),
        environment: Mapping[str, str] | None = None,
    ) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self.log_file, self._steps_file = folder / "job.log", folder / "steps.txt"
        self._log = self.log_file.open("w")
        self._environment = {
            **os.environ,
            "STEP_LOG": str(self._steps_file),
            "CHECKPOINT": str(folder / "checkpoint.pt"),
            "NUM_STEPS": "1000000",
            "OMP_NUM_THREADS": "1",
            "GLOO_SOCKET_IFNAME": "lo",
            **(environment or {}),
        }
        self._services = [self._start(command) for command in services]
        self._members = [self._start(command) for command in members]

    def _start(self, command: Command) -> subprocess.Popen[bytes]:
        return subprocess.Popen(
            command, env=self._environment, stdout=self._log, stderr=subprocess.STDOUT, start_new_session=True
        )

    def steps(self) -> list[CompletedStep]:
        return read_steps(self._steps_file)

    def hurt(self, case: str) -> None:
        """Do to a member what `case` says."""
        if case == "sigterm":
            # As when a pod is evicted.
            self._members[-1].terminate()
        else:
            # All its processes at once, as when a machine is gone.
            _kill_tree(self._members[0 if case == "store-host" else -1].pid)

    def has_ended(self) -> bool:
        """Whether nothing is left that could bring the job back."""
        is_alone = all(member.poll() is not None for member in self._members)
        return is_alone or any(service.poll() is not None for service in self._services)

    def close(self) -> None:
        for process in (*self._members, *self._services):
            _kill_tree(process.pid)
            process.wait()
        self._log.close()


def cost_of(case: str, job: Job, *, patience_seconds: float = PATIENCE_SECONDS) -> Outcome:
    """Apply `case` to the job once it is whole, and wait until it steps again. No process is left.

    Raises:
        SystemExit: The job ended before it had made WARM_STEPS steps.
    """
    try:
        while sum(step.world_size == NUM_NODES for step in job.steps()) < WARM_STEPS:
            if job.has_ended():
                raise SystemExit(f"The job ended before step {WARM_STEPS}; see {job.log_file}.")
            time.sleep(0.1)
        hurt_at = time.time()
        job.hurt(case)
        return outcome_of(job.steps, hurt_at, patience_seconds, job.has_ended)
    finally:
        job.close()


def _kill_tree(pid: int) -> None:
    try:
        root = psutil.Process(pid)
        processes = [root, *root.children(recursive=True)]
    except psutil.NoSuchProcess:
        return
    for process in processes:
        try:
            process.send_signal(signal.SIGKILL)
        except psutil.NoSuchProcess:
            continue
