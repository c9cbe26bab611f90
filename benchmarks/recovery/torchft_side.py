"""The torchft side: a lighthouse, and one replica group of one process a node, all on this machine.

Nothing waits for a member: the others go on as soon as the lighthouse has forgotten it.
"""

from __future__ import annotations

from pathlib import Path

from benchmarks.ports import free_ports
from benchmarks.recovery.job import HERE, LOCAL_ADDRESS, Job, cost_of
from benchmarks.recovery.model import MIN_NODES, NUM_NODES
from benchmarks.recovery.outcome import Outcome

# The default of a LighthouseServer in Python. With that of the command, 60 s, survivors wait for one that didn't talk
# to the lost member: it learns of the loss only when its own collective times out.
JOIN_TIMEOUT_MS = 100


def measure(case: str, folder: Path, *, python: Path, heartbeat_timeout_ms: int | None = None) -> Outcome:
    """Run the job with `python`, which has torchft, and return what `case` costs it.

    Cases are "sigterm" and "sigkill". Without a `heartbeat_timeout_ms`, the lighthouse takes its default, 5 s.
    """
    address = f"{LOCAL_ADDRESS}:{free_ports(1)[0]}"
    lighthouse = [
        str(python.with_name("torchft_lighthouse")), f"--min_replicas={MIN_NODES}", f"--bind={address}",
        f"--join_timeout_ms={JOIN_TIMEOUT_MS}",
        *([f"--heartbeat_timeout_ms={heartbeat_timeout_ms}"] if heartbeat_timeout_ms else []),
    ]  # fmt: skip
    members = [[str(python), str(HERE / "train_torchft.py"), str(member)] for member in range(NUM_NODES)]
    environment = {"TORCHFT_LIGHTHOUSE": f"http://{address}"}
    return cost_of(case, Job(folder, members=members, services=[lighthouse], environment=environment))
