"""The usual script of today: DDP under elastic torchrun.

It writes a checkpoint every 100 steps.
"""

from __future__ import annotations

import os
from pathlib import Path

import torch
import torch.distributed as dist
from model import CHECKPOINT_STEPS, batch_of, build_model, log_step, write_checkpoint  # type: ignore[import-not-found]
from torch.nn.functional import mse_loss
from torch.nn.parallel import DistributedDataParallel


def main() -> None:
    dist.init_process_group("gloo")
    rank, world_size = dist.get_rank(), dist.get_world_size()
    checkpoint = Path(os.environ["CHECKPOINT"])
    model = DistributedDataParallel(build_model())
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    step = 0
    if checkpoint.exists():
        state = torch.load(checkpoint, weights_only=True)
        model.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])
        step = state["step"]
    while step < int(os.environ["NUM_STEPS"]):
        inputs, targets = batch_of(step, rank, world_size)
        optimizer.zero_grad()
        mse_loss(model(inputs), targets).backward()
        optimizer.step()
        step += 1
        if rank == 0:
            log_step(step, world_size)
            if step % CHECKPOINT_STEPS == 0:
                state = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "step": step}
                write_checkpoint(checkpoint, state)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
