"""Runs one way of bench_throughput in a rank that is forked.

RANK_SETTINGS comes from the test. After each due commit, training waits for it: on a busy machine, the next one would
be left out.
"""

import os
import sys
from typing import Any

RANK_SETTINGS: dict[str, Any] = globals()["RANK_SETTINGS"]
os.environ.update(RANK_SETTINGS["environment"])
sys.path.insert(0, RANK_SETTINGS["root"])

import torch  # noqa: E402
from benchmarks.throughput import ranks  # noqa: E402

from cluster_fixtures import wait_for  # noqa: E402
from spottrain.checkpoint.format.head import read_head  # noqa: E402
from spottrain.checkpoint.stores.uri import open_storage  # noqa: E402

way, folder, _, every, _ = RANK_SETTINGS["args"]


class WaitingClock(ranks.Clock):
    def step(self, number: int, loss: torch.Tensor) -> None:
        super().step(number, loss)
        due, after = divmod(number, int(every))
        if way == ranks.OURS_COMMITS and due and after:
            wait_for(lambda: committed(due * int(every)), f"the commit of step {due * int(every)}")


def committed(step: int) -> bool:
    head = read_head(open_storage(f"file://{folder}/commits"))
    return head is not None and any(commit.step == step for commit in head.commits)


torch.set_num_threads(1)
sys.argv = ["ranks", *RANK_SETTINGS["args"]]
ranks.main(WaitingClock)
