"""The same training with torchft: its DDP and optimizer, one process a replica group.

Each member has a fixed share of a step's samples, as with torchft's own sampler.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

import torch
from model import (  # type: ignore[import-not-found]
    CHECKPOINT_STEPS,
    MIN_NODES,
    NUM_NODES,
    batch_of,
    build_model,
    log_step,
    write_checkpoint,
)
from torch._C._distributed_c10d import TCPStore
from torch.nn.functional import mse_loss
from torchft import DistributedDataParallel, Manager, Optimizer, ProcessGroupGloo

LOCAL_ADDRESS = "127.0.0.1"
State = dict[str, Any]


def main() -> None:
    member = int(sys.argv[1])
    checkpoint = Path(os.environ["CHECKPOINT"])
    plain = build_model()
    inner = torch.optim.AdamW(plain.parameters(), lr=1e-3)

    def training_state() -> State:
        return {"model": plain.state_dict(), "optimizer": inner.state_dict()}

    def load(state: State) -> None:
        plain.load_state_dict(state["model"])
        inner.load_state_dict(state["optimizer"])

    store = TCPStore(LOCAL_ADDRESS, 0, is_master=True, wait_for_workers=False)
    manager = Manager(
        pg=ProcessGroupGloo(),
        load_state_dict=load,
        state_dict=training_state,
        min_replica_size=MIN_NODES,
        rank=0,
        world_size=1,
        store_addr=LOCAL_ADDRESS,
        store_port=store.port,
        replica_id=f"member-{member}",
        hostname=LOCAL_ADDRESS,
    )
    if checkpoint.exists():
        state = torch.load(checkpoint, weights_only=True)
        load(state["training"])
        manager.load_state_dict(state["manager"])
    model, optimizer = DistributedDataParallel(manager, plain), Optimizer(manager, inner)
    while (step := manager.current_step()) < int(os.environ["NUM_STEPS"]):
        inputs, targets = batch_of(step, member, NUM_NODES)
        optimizer.zero_grad()
        mse_loss(model(inputs), targets).backward()
        optimizer.step()
        is_committed = manager.current_step() > step
        if is_committed and manager.participating_rank() == 0:
            log_step(step + 1, manager.num_participants())
            if (step + 1) % CHECKPOINT_STEPS == 0:
                write_checkpoint(checkpoint, {"training": training_state(), "manager": manager.state_dict()})


if __name__ == "__main__":
    main()
