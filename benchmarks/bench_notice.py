"""Seconds from a cloud's notice to the flag that the ranks see.

EC2, Compute Engine and Azure are side by side. `make bench-notice` repeatedly preempts a spot node of one job on a
local cluster with a spot node of each cloud, and takes the notice back as soon as the job has acted on it.

It compares two times of this machine's clock: when the node's metadata server starts to show the notice, and the
`drainSeenAt` of the first rank that finds a flag, which the rank writes at that step boundary. One rank's flag stops
all ranks, so each notice is one sample. Some samples are taken with the operator stopped. The table and a plot go to
bench-out/.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from datetime import datetime
from pathlib import Path

import matplotlib
import psutil

matplotlib.use("svg")
from matplotlib import pyplot as plt
from rich.console import Console
from rich.progress import track
from rich.table import Table

from benchmarks import clean_up_on_sigterm
from benchmarks.recovery.managed import ManagedJob, managed_job
from spottrain_api.contract.assignments import CapacityType
from spottrain_api.contract.reports import Progress
from spottrain_api.v1alpha1.status import GenerationState, GenerationStatus
from spottrain_local.layout import LocalClusterError
from spottrain_local.spec import SYSTEM_POOL, ClusterSpec, NodePool

NOTICE_SECONDS = 120.0
TARGET_SECONDS = 1.0
PATIENCE_SECONDS = 120.0
OPERATOR = "deployment/spottrain-operator"
# Each cloud's spot node, how the watcher hears it, and the notice that the cloud gives.
CLOUDS = {
    "EC2": ("eks-spot-0", "polled, 0.5 s", "120 s"),
    "Compute Engine": ("gke-spot-0", "long poll", "30 s (GKE: 15 s for pods)"),
    "Azure": ("aks-spot-0", "polled, 0.5 s", "30 s or more"),
}
SPEC = ClusterSpec(
    nodes=[
        NodePool(name=SYSTEM_POOL, gpus=0),
        NodePool(name="on-demand"),
        NodePool(name="eks-spot", provider="eks", capacity_type="spot"),
        NodePool(name="gke-spot", provider="gke", capacity_type="spot"),
        NodePool(name="aks-spot", provider="aks", capacity_type="spot"),
    ]
)
Samples = dict[str, list[float]]


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

    def samples(self, num: int, title: str, *, with_operator: bool) -> Samples:
        """Take `num` samples of each cloud, in turn as their nodes train.

        Seconds until the first rank saw a flag.
        """
        found: Samples = {cloud: [] for cloud in CLOUDS}
        for _ in track(range(num * len(CLOUDS)), title):
            cloud, seconds = self._sample([c for c in CLOUDS if len(found[c]) < num], found, with_operator)
            found[cloud].append(seconds)
        return found

    def _sample(self, clouds: list[str], found: Samples, with_operator: bool) -> tuple[str, float]:
        wait(f"a generation trains on a spot node of {', '.join(clouds)}", lambda: self._training(clouds))
        cloud = min(self._training(clouds), key=lambda each: len(found[each]))
        node = CLOUDS[cloud][0]
        generation = self._generation()
        assert generation is not None
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
        return cloud, (min(seen) - datetime.fromisoformat(shown)).total_seconds()

    def _generation(self) -> GenerationStatus | None:
        return self._job.status().generation

    def _training(self, clouds: list[str]) -> list[str]:
        """Those of `clouds` whose node trains."""
        generation = self._generation()
        if generation is None or generation.state is not GenerationState.ACTIVE or not generation.first_step_at:
            return []
        nodes = {m.node for m in generation.members if m.capacity_type is CapacityType.SPOT}
        return [cloud for cloud in clouds if CLOUDS[cloud][0] in nodes]

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


def plot(measured: dict[str, Samples], path: Path) -> None:
    """The share of the notices that have reached the ranks, over time."""
    figure, axes = plt.subplots(figsize=(7, 3.2))
    for (operator, samples), style in zip(measured.items(), ("-", ":"), strict=True):
        for number, (cloud, seconds) in enumerate(samples.items()):
            if seconds:
                label = f"{cloud}, operator {operator}"
                axes.ecdf(seconds, label=label, linestyle=style, color=f"C{number}")
    axes.axvline(TARGET_SECONDS, color="#888888", linewidth=0.8)
    axes.set(xlabel="seconds from the notice to the ranks' flag", ylabel="share of the notices", xlim=(0, None))
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(fontsize=8)
    figure.tight_layout()
    figure.savefig(path)


def table(measured: dict[str, Samples]) -> Table:
    """A row for each cloud, with the operator running and stopped."""
    columns = ("Cloud", "Heard by", "The cloud's notice", "Operator", "Samples", "p50", "p99", "Longest")
    rows = Table(*columns, title="Seconds from the notice to the ranks' flag")
    for operator, samples in measured.items():
        for cloud, seconds in samples.items():
            if seconds:
                numbers = (statistics.median(seconds), percentile(seconds, 0.99), max(seconds))
                texts = (f"{number:.2f}" for number in numbers)
                rows.add_row(cloud, *CLOUDS[cloud][1:], operator, str(len(seconds)), *texts)
    return rows


def main() -> int:
    clean_up_on_sigterm()
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("bench-out"))
    parser.add_argument("--rounds", type=int, default=30, help="notices of each cloud with the operator running")
    parser.add_argument("--rounds-stopped", type=int, default=10, help="the same, with the operator stopped")
    args = parser.parse_args()
    args.out.mkdir(parents=True, exist_ok=True)
    measured: dict[str, Samples] = {}
    try:
        with (
            tempfile.TemporaryDirectory(prefix="spottrain-bench-") as folder,
            managed_job(Path(folder), SPEC) as job,
        ):
            bench = NoticeBench(job)
            for name, num in (("running", args.rounds), ("stopped", args.rounds_stopped)):
                title = f"Notices, operator {name}"
                measured[name] = bench.samples(num, title, with_operator=name == "running")
    except (LocalClusterError, TimeoutError, subprocess.CalledProcessError) as error:
        print(f"bench_notice: {error}", file=sys.stderr)
        return 2
    Console(width=130).print(table(measured))
    plot(measured, args.out / "notice.svg")
    (args.out / "notice.json").write_text(json.dumps(measured, indent=1))
    each = [seconds for samples in measured.values() for seconds in samples.values() if seconds]
    return 0 if all(percentile(seconds, 0.99) < TARGET_SECONDS for seconds in each) else 1


if __name__ == "__main__":
    sys.exit(main())
