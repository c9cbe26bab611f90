"""The plain side: one elastic torchrun agent a node, all on this machine.

Each agent has `--nnodes=2:4`.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil

from benchmarks.recovery.outcome import CompletedStep, Outcome, outcome_of, read_steps

NUM_NODES, MIN_NODES = 4, 2
HERE = Path(__file__).parent
LOCAL_ADDRESS = "127.0.0.1"


class PlainJob:
    """Four torchrun agents. Node 0 hosts the rendezvous store."""

    def __init__(self, folder: Path, port: int) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self.steps_file = folder / "steps.txt"
        environment = os.environ | {
            "STEP_LOG": str(self.steps_file),
            "CHECKPOINT": str(folder / "checkpoint.pt"),
            "NUM_STEPS": "1000000",
            "OMP_NUM_THREADS": "1",
            "GLOO_SOCKET_IFNAME": "lo",
        }
        self.log_file = folder / "torchrun.log"
        self._log = self.log_file.open("w")
        self._agents = [
            subprocess.Popen(
                [
                    sys.executable, "-m", "torch.distributed.run", f"--nnodes={MIN_NODES}:{NUM_NODES}",
                    "--nproc-per-node=1", "--max-restarts=100", "--rdzv-backend=c10d", "--rdzv-id=bench",
                    f"--rdzv-endpoint={LOCAL_ADDRESS}:{port}", f"--local-addr={LOCAL_ADDRESS}",
                    f"--rdzv-conf=is_host={'true' if node == 0 else 'false'}", f"--log-dir={folder}",
                    str(HERE / "train_plain.py"),
                ],
                env=environment, stdout=self._log, stderr=subprocess.STDOUT, start_new_session=True,
            )
            for node in range(NUM_NODES)
        ]  # fmt: skip

    def steps(self) -> list[CompletedStep]:
        return read_steps(self.steps_file)

    def terminate(self, node: int) -> None:
        """Send SIGTERM to the agent, as when a pod is evicted."""
        self._agents[node].terminate()

    def kill(self, node: int) -> None:
        """Kill the agent and all its workers at once, as when a machine is gone."""
        _kill_tree(self._agents[node].pid)

    def has_ended(self) -> bool:
        """Whether no agent is left that could bring the job back."""
        return all(agent.poll() is not None for agent in self._agents)

    def close(self) -> None:
        for agent in self._agents:
            _kill_tree(agent.pid)
            agent.wait()
        self._log.close()


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


def measure(case: str, folder: Path, port: int, *, warm_steps: int, patience_seconds: float) -> Outcome:
    """Run the job, apply `case` to it, and wait until it steps again.

    Cases are "sigterm", "sigkill" and "store-host".

    Raises:
        SystemExit: The job ended before it had made `warm_steps` steps.
    """
    job = PlainJob(folder, port)
    try:
        while len(job.steps()) < warm_steps:
            if job.has_ended():
                raise SystemExit(f"All torchrun agents ended before step {warm_steps}; see {job.log_file}.")
            time.sleep(0.1)
        hurt_at = time.time()
        {
            "sigterm": lambda: job.terminate(NUM_NODES - 1),
            "sigkill": lambda: job.kill(NUM_NODES - 1),
            "store-host": lambda: job.kill(0),
        }[case]()
        return outcome_of(job.steps, hurt_at, patience_seconds, job.has_ended)
    finally:
        job.close()
