"""DeepSpeed's own `save_checkpoint` of a model under ZeRO stage 1.

It saves as many bytes as the other ways.
"""

from __future__ import annotations

import contextlib
import os
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor

from benchmarks.checkpoint.state import TENSOR_BYTES


class DeepSpeedSave:
    """Half of the bytes are the model's weights, which rank 0 writes.

    The other half is every rank's part of their fp32 copy in the optimizer, which is plain SGD. A different number of
    ranks needs a conversion to load it.
    """

    name = "DeepSpeed save_checkpoint"

    def __init__(self, root: Path, mib: int, device: torch.device) -> None:
        os.environ.setdefault("DS_ACCELERATOR", device.type)
        import deepspeed

        deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False  # its compilation on a CPU takes minutes
        self._root = root
        shape = (TENSOR_BYTES // 4 // 1024, 1024)
        layers = [nn.Parameter(torch.randn(shape, device=device)) for _ in range((mib << 20) // TENSOR_BYTES // 2)]
        model = nn.ParameterList(layers)
        config = {
            "train_micro_batch_size_per_gpu": 1,
            "zero_optimization": {"stage": 1},
            "zero_allow_untested_optimizer": True,
            "zero_force_ds_cpu_optimizer": False,
        }
        with contextlib.redirect_stdout(None):  # its memory statistics
            self._engine: Any = deepspeed.initialize(
                model=model,
                optimizer=torch.optim.SGD(model.parameters(), lr=0.1),
                config=config,
                dist_init_required=False,
            )[0]

    def save(self, state: dict[str, dict[str, DTensor]], number: int) -> None:
        self._engine.save_checkpoint(self._root, tag=f"deepspeed-{number}", save_latest=False)
        for path in (self._root / f"deepspeed-{number}").glob(f"*rank_{dist.get_rank()}_*"):
            sync(path)
        if dist.get_rank() == 0:
            for path in (self._root / f"deepspeed-{number}").glob("mp_rank_*"):
                sync(path)

    def finish(self) -> None:
        dist.barrier()

    def load(self, state: dict[str, dict[str, DTensor]], number: int) -> None:
        found, _ = self._engine.load_checkpoint(self._root, tag=f"deepspeed-{number}")
        if found is None:
            raise RuntimeError("DeepSpeed found nothing to load")


def sync(path: Path) -> None:
    """Make a file durable that other code has written."""
    descriptor = os.open(path, os.O_RDONLY)
    os.fsync(descriptor)
    os.close(descriptor)
