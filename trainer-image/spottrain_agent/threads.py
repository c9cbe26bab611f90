"""How many threads each rank computes with on the CPU: its share of the container's processors."""

from __future__ import annotations

import os
import sys
from pathlib import Path

ENV_THREADS = "OMP_NUM_THREADS"
_CGROUP = Path("/sys/fs/cgroup")


def share_of_quota(num_ranks: int, cgroup: Path | None = None) -> int:
    """The processors of the container for each of its ranks, at least 1.

    1 if the container has no limit of processors: other pods of the node may need them.
    """
    quota = _quota(cgroup or _CGROUP)
    return max(1, int(quota / num_ranks)) if quota is not None else 1


def use_threads() -> None:
    """Make torch use the number in OMP_NUM_THREADS. OpenMP has read it in the zygote, where it is 1."""
    # It may be a list, for nested regions.
    number, torch = os.environ.get(ENV_THREADS, "").partition(",")[0], sys.modules.get("torch")
    if torch is not None and number.isdecimal() and int(number) > 1:
        torch.set_num_threads(int(number))


def _quota(cgroup: Path) -> float | None:
    """The processors that cgroup v2 or v1 allows; None without a limit."""
    try:
        if (file := cgroup / "cpu.max").exists():
            quota, period = file.read_text().split()
        else:
            quota, period = (
                (cgroup / "cpu" / f"cpu.cfs_{name}_us").read_text().strip() for name in ("quota", "period")
            )
        return int(quota) / int(period) if quota not in ("max", "-1") else None
    except (OSError, ValueError, ZeroDivisionError):  # another file system, or "max" in a form that isn't known
        return None
