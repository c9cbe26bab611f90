"""From a cloud's notice to the flag that the ranks see, with the operator running and with it stopped.

`make bench-notice` preempts the spot nodes of a job on a local cluster over and over, takes the notice back as soon
as it is acted on, and compares two times of this machine's clock: when the metadata server began to show the notice,
and the rank's own `drainSeenAt`, which it writes at the step boundary where it finds the flag.
"""

from __future__ import annotations

import argparse
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
from rich.table import Table

from spottrain_api.contract import CapacityType, Progress
from spottrain_api.v1alpha1 import GenerationState, GenerationStatus

from .recovery.managed import ManagedJob

NOTICE_SECONDS = 120.0
TARGET_SECONDS = 1.0
PATIENCE_SECONDS = 120.0
OPERATOR = "deployment/spottrain-operator"


def wait(what: str, condition: Callable[[], object]) -> None:
    """Raises TimeoutError with `what` was missing."""
    give_up_at = time.monotonic() + PATIENCE_SECONDS
    while not condition():
        if time.monotonic() > give_up_at:
            raise TimeoutError(f"not within {PATIENCE_SECONDS:.0f} s: {what}")
        time.sleep(0.02)


class NoticeBench:
    """A job whose spot nodes are announced to go, and stay."""

    def __init__(self, job: ManagedJob) -> None:
        self._job = job

    def round(self, *, with_operator: bool) -> list[float]:
        """Announce all spot nodes at once; a sample for each rank that saw its own flag before the world stopped."""
        wait("a generation trains on a spot node", self._trains)
        generation = self._generation()
        assert generation is not None
        spot = [m.node for m in generation.members if m.capacity_type is CapacityType.SPOT]
        if not with_operator:
            self._scale_operator(0)
        self._job.cluster.preempt(spot, notice_seconds=NOTICE_SECONDS)
        status = self._job.cluster.running_status()
        noticed_at = {
            node["node"]: datetime.fromisoformat(node["interruption"]["noticeAt"])
            for node in status["nodes"]
            if node["node"] in spot
        }
        wait("the ranks have left", lambda: self._have_left(generation))
        self._job.cluster.cancel(spot)
        seen = {node: self._seen_at(node, generation.number) for node in spot}
        if not with_operator:
            self._scale_operator(1)
        wait("the next generation", lambda: (now := self._generation()) and now.number > generation.number)
        return [(at - noticed_at[node]).total_seconds() for node, at in seen.items() if at is not None]

    def _generation(self) -> GenerationStatus | None:
        return self._job.status().generation

    def _trains(self) -> bool:
        generation = self._generation()
        if generation is None or generation.state is not GenerationState.ACTIVE or not generation.first_step_at:
            return False
        return any(m.capacity_type is CapacityType.SPOT for m in generation.members)

    def _progress(self, node: str, number: int) -> list[Progress]:
        folder = self._job.cluster.layout.root / "nodes" / node / "pods"
        found = (Progress.read(path) for path in folder.glob(f"*/v/*/g{number}/progress-0.json"))
        return [progress for progress in found if progress is not None]

    def _seen_at(self, node: str, number: int) -> datetime | None:
        times = [p.drain_seen_at for p in self._progress(node, number) if p.drain_seen_at is not None]
        return min(times, default=None)

    def _have_left(self, generation: GenerationStatus) -> bool:
        found = [p for m in generation.members for p in self._progress(m.node, generation.number)]
        return bool(found) and all(progress.phase.value == "done" for progress in found)

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
            except psutil.Error:  # it ended, or is another user's
                continue
        return found


def percentile(samples: list[float], share: float) -> float:
    """The smallest sample that at least `share` of all don't exceed."""
    ordered = sorted(samples)
    return ordered[max(0, -(-int(share * 100) * len(ordered) // 100) - 1)]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=20, help="preemptions with the operator running")
    parser.add_argument("--rounds-stopped", type=int, default=8, help="preemptions with the operator stopped")
    args = parser.parse_args()
    table = Table("Operator", "Samples", "p50", "p99", "Longest", title="Seconds from the notice to the ranks' flag")
    passed = True
    with tempfile.TemporaryDirectory(prefix="spottrain-bench-") as folder:
        job = ManagedJob(Path(folder))
        try:
            bench = NoticeBench(job)
            for name, rounds, runs in (("running", args.rounds, True), ("stopped", args.rounds_stopped, False)):
                samples = [each for _ in range(rounds) for each in bench.round(with_operator=runs)]
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
