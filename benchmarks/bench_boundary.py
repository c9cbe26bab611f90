"""What `run.boundary()` costs a step of 50 ms in a script's own loop.

Run: torchrun --standalone --nproc-per-node 2 benchmarks/bench_boundary.py

Each rank has a model of 20 layers under DDP. A step computes matrix products for 50 ms, which fill the processor's
caches, and averages gradients. The boundary is measured alone, because the difference of whole steps would drown in
the noise of the machine: its seconds, and those of the processor in its thread, which leave out the wait for other
ranks. "warm" are boundaries after steps that compute next to nothing.
"""

from __future__ import annotations

import argparse
import os
import statistics
import tempfile
import time
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import spottrain
from spottrain.loop.run import Run
from spottrain_api.contract.configuration import TrainerConfig
from spottrain_api.contract.names import ENV_RUN_DIR, FILE_RUN

NUM_LAYERS, WIDTH, NUM_WARM_UP = 20, 64, 20
STEP_SECONDS = 0.05
CONFIG = TrainerConfig.model_validate(
    {
        "job": "boundary",
        "generation": 1,
        "attempt_id": "",
        "seed": 0,
        "strategy": "ddp",
        "batch": {"global": 8, "micro": 8},
        "checkpoint": {"uri": None},
    }
)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=200)
    args = parser.parse_args()
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:  # one for each rank, as on nodes of their own
        os.environ[ENV_RUN_DIR] = folder
        CONFIG.write(Path(folder) / FILE_RUN)
        measure(args.steps)


def measure(num_steps: int) -> None:
    """Time the boundaries of a run, first those one after the other."""
    with spottrain.session() as session:
        model: nn.Module = nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(NUM_LAYERS)))
        if session.world_size > 1:
            model = DistributedDataParallel(model)
        optimizer = torch.optim.AdamW(model.parameters())
        run = session.attach(total=2 * num_steps, model=model, optimizer=optimizer)
        warm = [timed(run, model, optimizer) for _ in range(num_steps)]
        cold = [timed(run, model, optimizer, seconds=STEP_SECONDS) for _ in range(num_steps)]
        for kind, spent in (("warm", warm), ("after a step", cold)):
            report(kind, spent[NUM_WARM_UP:])


def timed(
    run: Run, model: nn.Module, optimizer: torch.optim.Optimizer, *, seconds: float = 0.0
) -> tuple[float, float]:
    """Make a step that computes for so long. Returns the seconds of its boundary, and those of the processor."""
    ends, factor = time.perf_counter() + seconds, torch.ones(1024, 1024)
    while time.perf_counter() < ends:
        factor @ factor
    loss = model(torch.ones(8, WIDTH)).square().mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    began, busy = time.perf_counter(), time.thread_time()
    run.boundary(loss)
    return time.perf_counter() - began, time.thread_time() - busy


def report(kind: str, spent: list[tuple[float, float]]) -> None:
    """Print a row of the medians of the slowest rank."""
    medians = torch.tensor([statistics.median(each) for each in zip(*spent, strict=True)])
    if dist.get_world_size() > 1:
        dist.all_reduce(medians, op=dist.ReduceOp.MAX)
    if dist.get_rank() == 0:
        whole, busy = medians.tolist()
        print(f"{kind:<14}{whole * 1e3:>8.2f} ms, {busy * 1e3:.2f} of the processor, {whole / STEP_SECONDS:.1%}")


if __name__ == "__main__":
    main()
