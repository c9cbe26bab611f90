"""The spottrain side: the same model as a TrainingJob on a local cluster.

The cluster has two on-demand and two spot nodes.
"""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import yaml

from benchmarks.recovery.model import CHECKPOINT_STEPS, GLOBAL_BATCH, MIN_NODES, NUM_NODES
from benchmarks.recovery.outcome import PATIENCE_SECONDS, WARM_STEPS, CompletedStep, Outcome, outcome_of, read_steps
from spottrain_api.contract.reports import Progress
from spottrain_api.v1alpha1.status import Phase, TrainingJobStatus
from spottrain_cli.job_view import JobReader
from spottrain_local.cluster import Cluster, open_cluster
from spottrain_local.install import install_operator
from spottrain_local.spec import SYSTEM_POOL, ClusterSpec, NodePool

JOB, NAMESPACE = "recovery", "default"
ON_DEMAND_NODES = 2
NOTICE_SECONDS = 30.0
SPEC = ClusterSpec(
    nodes=[
        NodePool(name=SYSTEM_POOL, gpus=0),
        NodePool(name="on-demand", count=ON_DEMAND_NODES),
        NodePool(name="spot", count=NUM_NODES - ON_DEMAND_NODES, capacity_type="spot"),
    ]
)


class ManagedJob:
    """The job on a local cluster; `managed_job` runs it."""

    def __init__(self, cluster: Cluster, steps_file: Path) -> None:
        self.cluster = cluster
        self._steps_file = steps_file
        self._reader = JobReader(str(cluster.kubeconfig))

    def kubectl(self, *arguments: str) -> None:
        kubectl = Path(sys.executable).with_name("kubectl")
        subprocess.run(
            [kubectl, "--kubeconfig", self.cluster.kubeconfig, *arguments], check=True, capture_output=True
        )

    def status(self) -> TrainingJobStatus:
        return self._reader.read(NAMESPACE, JOB).status

    def steps(self) -> list[CompletedStep]:
        return read_steps(self._steps_file)

    def wait_until_whole(self, warm_steps: int) -> None:
        """Wait until all nodes train together.

        The newest generation must have made `warm_steps` steps.
        """
        while True:
            status = self.status()
            if status.phase is Phase.FAILED:
                raise RuntimeError(f"the job failed: {status.message}")
            generation = status.generation
            if generation and generation.world_size == NUM_NODES and generation.first_step_at:
                since = generation.first_step_at.timestamp()
                if sum(step.at > since for step in self.steps()) >= warm_steps:
                    return
            time.sleep(0.2)

    def node_of_rank(self, rank: int) -> str:
        generation = self.status().generation
        assert generation is not None
        return next(member.node for member in generation.members if member.node_rank == rank)

    def hurt(self, case: str) -> None:
        """Do to a node what `case` says."""
        node = self.node_of_rank(0 if case == "store-host" else NUM_NODES - 1)
        if case == "sigterm":
            self.cluster.preempt([node], notice_seconds=NOTICE_SECONDS)
        else:
            self.cluster.kill([node])

    def phases(self, last_step_at: float) -> dict[str, float]:
        """Return the seconds of each phase of a recovery.

        It lasts from `last_step_at` to the newest generation's first step.
        """
        status = self.status()
        generation = status.generation
        assert generation is not None
        found = [
            Progress.read(path) for path in self.cluster.layout.root.rglob(f"g{generation.number}/progress-0.json")
        ]
        rank = next(progress for progress in found if progress is not None and "first_step" in progress.milestones)
        marks = [("noticing and deciding", generation.started_at.timestamp())]
        names = {
            "python_started": "start of the ranks (rendezvous, fork)",
            "process_group": "process group",
            "prepared": "model and store",
            "loaded": "loading the commit",
            "first_step": "first step",
        }
        marks += [(title, rank.milestones[name].timestamp()) for name, title in names.items()]
        commit = generation.resume
        if commit is not None and commit.committed_at.timestamp() > last_step_at:
            marks.insert(0, ("agreement and commit", commit.committed_at.timestamp()))
        spent, before = {}, last_step_at
        for title, at in marks:
            spent[title] = max(0.0, at - before)
            before = max(before, at)
        return spent


@contextmanager
def managed_job(folder: Path, spec: ClusterSpec = SPEC) -> Iterator[ManagedJob]:
    """Run the job on a local cluster of its own.

    No cluster is left, whatever happens.

    Raises:
        LocalClusterError: The cluster did not start, or the operator could not be installed.
    """
    folder.mkdir(parents=True, exist_ok=True)
    os.environ["SPOTTRAIN_LOCAL_HOME"] = str(folder / "clusters")
    steps_file, manifest = folder / "steps.txt", folder / "trainingjob.yaml"
    manifest.write_text(yaml.safe_dump(_manifest(spec, steps_file)))
    cluster = open_cluster("bench")
    try:
        cluster.up(spec)
        install_operator(cluster)
        job = ManagedJob(cluster, steps_file)
        job.kubectl("apply", "-f", str(manifest))
        yield job
    finally:
        cluster.down(delete=True)


def _manifest(spec: ClusterSpec, steps_file: Path) -> dict[str, object]:
    pools = [pool for pool in spec.nodes if pool.name != SYSTEM_POOL]
    num_on_demand = sum(pool.count for pool in pools if pool.capacity_type == "on-demand")
    return {
        "apiVersion": "spottrain.dev/v1alpha1",
        "kind": "TrainingJob",
        "metadata": {"name": JOB},
        "spec": {
            "image": "local/trainer",
            "entrypoint": {"script": str(Path(__file__).with_name("train_spottrain.py"))},
            "env": [
                {"name": "STEP_LOG", "value": str(steps_file)},
                {"name": "NUM_STEPS", "value": "1000000"},
            ],
            "nodes": {"min": MIN_NODES, "max": sum(pool.count for pool in pools)},
            "capacity": {"onDemand": {"min": num_on_demand}, "fallback": {"policy": "None"}},
            "strategy": "ddp",
            "batch": {"global": GLOBAL_BATCH, "micro": GLOBAL_BATCH // MIN_NODES},
            "checkpoint": {"uri": "s3://checkpoints/recovery", "interval": f"{CHECKPOINT_STEPS}steps"},
        },
    }


def measure(case: str, folder: Path) -> Outcome:
    """Run the job on a cluster of its own, and return what `case` costs it."""
    with managed_job(folder) as job:
        return cost_of(case, job)


def cost_of(case: str, job: ManagedJob, *, patience_seconds: float = PATIENCE_SECONDS) -> Outcome:
    """Apply one case to a whole job, and wait until it steps again."""
    job.wait_until_whole(WARM_STEPS)
    hurt_at = time.time()
    job.hurt(case)
    outcome = outcome_of(job.steps, hurt_at, patience_seconds)
    if outcome.stopped_at is None:
        return outcome
    return replace(outcome, phases=job.phases(outcome.stopped_at))
