"""From a cloud's notice to the flag that the ranks see, with the operator running and with it stopped.

`make bench-notice` repeatedly preempts a spot node of a job on a local cluster, and takes the notice back as soon as
the job has acted on it. It compares two times of this machine's clock: when the metadata server starts to show the
notice, and the `drainSeenAt` of the first rank that finds a flag, which the rank writes at that step boundary. One
rank's flag stops all ranks, so each notice is one sample.
"""

from __future__ import annotations

import argparse
import random
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from datetime import datetime
from pathlib import Path

import psutil
from rich.console import Console
from rich.progress import track
from rich.table import Table

from benchmarks import clean_up_on_sigterm
from benchmarks.recovery.managed import ManagedJob
from spottrain_api.contract import CapacityType, Progress
from spottrain_api.v1alpha1 import GenerationState, GenerationStatus

NOTICE_SECONDS = 120.0
TARGET_SECONDS = 1.0
PATIENCE_SECONDS = 120.0
OPERATOR = "deployment/spottrain-operator"


def wait(what: str, condition: Callable[[], object]) -> None:
    """Wait for a condition. Raises TimeoutError, which names `what` was missing."""
    give_up_at = time.monotonic() + PATIENCE_SECONDS
    while not condition():
        if time.monotonic() > give_up_at:
            raise TimeoutError(f"not within {PATIENCE_SECONDS:.0f} s: {what}")
        time.sleep(0.02)


class NoticeBench:
    """A job whose spot nodes get notices, one after the other, but stay."""

    def __init__(self, job: ManagedJob) -> None:
        self._job = job

    def sample(self, *, with_operator: bool) -> float:
        """Give notice to a spot node. Returns the seconds until the first rank saw a flag."""
        wait("a generation trains on a spot node", self._trains)
        generation = self._generation()
        assert generation is not None
        node = random.choice([m.node for m in generation.members if m.capacity_type is CapacityType.SPOT])
        if not with_operator:
            self._scale_operator(0)
        self._job.cluster.preempt([node], notice_seconds=NOTICE_SECONDS)
        nodes = self._job.cluster.running_status()["nodes"]
        shown = next(each["interruption"]["noticeAt"] for each in nodes if each["node"] == node)
        wait("the ranks have left", lambda: self._have_left(generation))
        self._job.cluster.cancel([node])
        seen = [p.drain_seen_at for p in self._progress(generation) if p.drain_seen_at is not None]
        if not with_operator:
            self._scale_operator(1)
        wait("the next generation", lambda: (now := self._generation()) and now.number > generation.number)
        return (min(seen) - datetime.fromisoformat(shown)).total_seconds()

    def _generation(self) -> GenerationStatus | None:
        return self._job.status().generation

    def _trains(self) -> bool:
        generation = self._generation()
        if generation is None or generation.state is not GenerationState.ACTIVE or not generation.first_step_at:
            return False
        return any(m.capacity_type is CapacityType.SPOT for m in generation.members)

    def _progress(self, generation: GenerationStatus) -> list[Progress]:
        """The newest report of each member's first rank."""
        root = self._job.cluster.layout.root
        files = (
            path
            for member in generation.members
            for path in root.glob(f"nodes/{member.node}/pods/*/v/*/g{generation.number}/progress-0.json")
        )
        return [progress for path in files if (progress := Progress.read(path)) is not None]

    def _have_left(self, generation: GenerationStatus) -> bool:
        found = self._progress(generation)
        return len(found) == len(generation.members) and all(progress.phase.value == "done" for progress in found)

    def _scale_operator(self, replicas: int) -> None:
        self._job.kubectl("--namespace=spottrain-system", "scale", OPERATOR, f"--replicas={replicas}")
        wait(f"{replicas} operators run", lambda: self._num_operators() == replicas)

    def _num_operators(self) -> int:
        root = str(self._job.cluster.layout.root)
        found = 0
        for process in psutil.process_iter():
            try:
                command = process.cmdline()
                found += "spottrain_operator" in command and root in " ".join(process.environ().values())
            except psutil.Error:  # it ended, or belongs to a different user
                continue
        return found


def percentile(samples: list[float], share: float) -> float:
    """The smallest sample that is at least as large as `share` of all samples."""
    ordered = sorted(samples)
    return ordered[max(0, -(-int(share * 100) * len(ordered) // 100) - 1)]


def main() -> int:
    clean_up_on_sigterm()
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=100, help="notices with the operator running")
    parser.add_argument("--rounds-stopped", type=int, default=30, help="notices with the operator stopped")
    args = parser.parse_args()
    table = Table("Operator", "Samples", "p50", "p99", "Longest", title="Seconds from the notice to the ranks' flag")
    passed = True
    with tempfile.TemporaryDirectory(prefix="spottrain-bench-") as folder:
        job = ManagedJob(Path(folder))
        try:
            bench = NoticeBench(job)
            for name, rounds, runs in (("running", args.rounds, True), ("stopped", args.rounds_stopped, False)):
                title = f"Notices, operator {name}"
                samples = [bench.sample(with_operator=runs) for _ in track(range(rounds), title)]
                numbers = (statistics.median(samples), percentile(samples, 0.99), max(samples))
                table.add_row(name, str(len(samples)), *(f"{number:.3f}" for number in numbers))
                passed = passed and numbers[1] < TARGET_SECONDS
        except (TimeoutError, subprocess.CalledProcessError) as error:
            print(f"bench_notice: {error}", file=sys.stderr)
            return 2
        finally:
            job.close()
    Console().print(table)
    return 0 if passed else 1


if __name__ == "__main__":
    sys.exit(main())
