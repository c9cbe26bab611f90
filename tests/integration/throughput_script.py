"""Runs one way of bench_throughput in a rank that is forked.

RANK_SETTINGS comes from the test.
"""

import os
import sys
from typing import Any

RANK_SETTINGS: dict[str, Any] = globals()["RANK_SETTINGS"]
os.environ.update(RANK_SETTINGS["environment"])
sys.path.insert(0, RANK_SETTINGS["root"])

import torch  # noqa: E402
from benchmarks.throughput import ranks  # noqa: E402

torch.set_num_threads(1)
sys.argv = ["ranks", *RANK_SETTINGS["args"]]
ranks.main()
