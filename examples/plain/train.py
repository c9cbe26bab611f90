"""A plain torchrun script that does not use spottrain.

It saves to a file on SIGTERM, and resumes from it.

spottrain sends SIGTERM before a node goes, and SPOTTRAIN_GRACE_SECONDS says how much time is left. Then it starts the
script again on the nodes that remain. All ranks see --folder (a shared volume), as is usual for such scripts. The
signal reaches the ranks at different steps, so they agree on the step to stop at.
"""

from __future__ import annotations

import argparse
import signal
import time
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel


class StopSignal:
    """Whether this rank has received SIGTERM."""

    def __init__(self) -> None:
        self.received = False
        signal.signal(signal.SIGTERM, self._receive)

    def _receive(self, *_: object) -> None:
        self.received = True

    def on_any_rank(self) -> bool:
        """Whether any rank has received it.

        This is a collective, with the same answer on all ranks.
        """
        flag = torch.tensor(int(self.received))
        dist.all_reduce(flag, op=dist.ReduceOp.MAX)
        return bool(flag)


def save(path: Path, model: nn.Module, optimizer: torch.optim.Optimizer, step: int) -> None:
    unfinished = path.with_suffix(".unfinished")
    torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict(), "step": step}, unfinished)
    unfinished.replace(path)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--step-seconds", type=float, default=0.05, help="pretend that a step takes this long")
    parser.add_argument("--folder", type=Path, required=True)
    args = parser.parse_args()

    stop = StopSignal()
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    model = DistributedDataParallel(nn.Linear(16, 1))
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    step, path = 0, args.folder / "checkpoint.pt"
    if path.exists():
        saved = torch.load(path, weights_only=True)
        model.load_state_dict(saved["model"])
        optimizer.load_state_dict(saved["optimizer"])
        step = saved["step"]

    while step < args.steps and not stop.on_any_rank():
        inputs = torch.randn(32, 16, generator=torch.Generator().manual_seed(step * 1000 + dist.get_rank()))
        loss = (model(inputs).squeeze(1) - inputs.sum(dim=1)).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        time.sleep(args.step_seconds)
        step += 1
        if dist.get_rank() == 0 and step % 10 == 1:
            print(f"step {step}: loss {loss.item():.3f}", flush=True)

    if dist.get_rank() == 0:
        args.folder.mkdir(parents=True, exist_ok=True)
        save(path, model, optimizer, step)
        print(f"{'finished' if step == args.steps else 'stopped'} at step {step}", flush=True)
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
