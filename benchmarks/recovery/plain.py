"""The plain side: one elastic torchrun agent a node, all on this machine.

Each agent has `--nnodes=2:4`. Node 0 hosts the rendezvous store.
"""

from __future__ import annotations

import sys
from pathlib import Path

from benchmarks.ports import free_ports
from benchmarks.recovery.job import HERE, LOCAL_ADDRESS, Job, cost_of
from benchmarks.recovery.model import MIN_NODES, NUM_NODES
from benchmarks.recovery.outcome import Outcome


def measure(case: str, folder: Path) -> Outcome:
    """Run the job, and return what `case` costs it.

    Cases are "sigterm", "sigkill" and "store-host".
    """
    (port,) = free_ports(1)
    agents = [
        [
            sys.executable, "-m", "torch.distributed.run", f"--nnodes={MIN_NODES}:{NUM_NODES}",
            "--nproc-per-node=1", "--max-restarts=100", "--rdzv-backend=c10d", "--rdzv-id=bench",
            f"--rdzv-endpoint={LOCAL_ADDRESS}:{port}", f"--local-addr={LOCAL_ADDRESS}",
            f"--rdzv-conf=is_host={'true' if node == 0 else 'false'}", f"--log-dir={folder}",
            str(HERE / "train_plain.py"),
        ]
        for node in range(NUM_NODES)
    ]  # fmt: skip
    return cost_of(case, Job(folder, members=agents))
