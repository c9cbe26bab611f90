"""No process from which ranks are forked touches the CUDA runtime: a fork could then use no GPU."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

from lone_member import generation
from spottrain_agent.launcher import torchrun_arguments
from spottrain_api.settings.entrypoint import Entrypoint

# What zygote and launcher do, up to where torchrun forks the ranks. The CUDA runtime is replaced by one that writes
# the questions down, and NVML by none (-1), or by one that knows of a GPU for each rank.
BEFORE_THE_RANKS = """
import json, os, sys
import torch

asked = []
nvml_count = -1
torch._C._cuda_getDeviceCount = lambda: asked.append("count") or 2
torch._C._cuda_init = lambda: asked.append("init")
torch.cuda._is_compiled = lambda: True
torch.cuda._raw_device_count_nvml = lambda: nvml_count
torch.accelerator.current_accelerator = lambda check_available=False: torch.device("cuda")
os.environ["PYTORCH_NVML_BASED_CUDA_CHECK"] = "1"

from spottrain_agent.launcher import launch_config
from spottrain_agent.zygote import PRELOADED_MODULES, REQUIRED_MODULES, preload

preload((*REQUIRED_MODULES, *PRELOADED_MODULES))
found = [["preloaded", *asked]]
for nvml_count, visible in ((-1, None), (-1, "0,1"), (2, "MIG-4f1c,MIG-77aa"), (2, None), (2, "0,1")):
    asked.clear()
    os.environ.pop("CUDA_VISIBLE_DEVICES", None)
    if visible is not None:
        os.environ["CUDA_VISIBLE_DEVICES"] = visible
    config = launch_config(json.loads(sys.argv[1]))
    kept = os.environ.get("CUDA_VISIBLE_DEVICES") == visible
    binds = config.numa_options is not None
    found.append([nvml_count, visible, *asked, *(["binds"] if binds else []), *([] if kept else ["not kept"])])
print(json.dumps(found))
"""


def test_a_launcher_asks_the_cuda_runtime_nothing(tmp_path: Path) -> None:
    member = generation(Entrypoint(script="train.py"), processes_per_node=2)
    arguments = json.dumps(torchrun_arguments(member, "127.0.0.1", tmp_path))
    command = [sys.executable, "-c", BEFORE_THE_RANKS, arguments]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=120)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout.splitlines()[-1]) == [
        ["preloaded"],
        *([-1, None], [-1, "0,1"], [2, "MIG-4f1c,MIG-77aa"], [2, None], [2, "0,1"]),
    ]
