"""The state to save: sharded tensors, as FSDP2's, spread evenly over the ranks."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard

State = dict[str, dict[str, DTensor]]

TENSOR_BYTES = 16 << 20
_WIDTH = 1024


def sharded_state(mib: int, device: torch.device, *, fill: bool) -> dict[str, dict[str, DTensor]]:
    """About `mib` MiB in total, in tensors of 16 MiB.

    Random if they are filled, otherwise zero.
    """
    world_size = dist.get_world_size()
    mesh = init_device_mesh(device.type, (world_size,))
    rows = TENSOR_BYTES // 4 // _WIDTH
    chunk = -(-rows // world_size)  # DTensor shards as torch.chunk does
    mine = max(0, min(chunk, rows - chunk * dist.get_rank()))
    generator = torch.Generator(device).manual_seed(dist.get_rank())
    tensors = {}
    for number in range((mib << 20) // TENSOR_BYTES):
        local = torch.zeros(mine, _WIDTH, device=device)
        if fill:
            local.normal_(generator=generator)
        tensors[f"layer{number}"] = DTensor.from_local(
            local, mesh, [Shard(0)], run_check=False, shape=torch.Size((rows, _WIDTH)), stride=(_WIDTH, 1)
        )
    return {"model": tensors}


def local_tensors(state: dict[str, dict[str, DTensor]]) -> list[torch.Tensor]:
    """Bytes that this rank holds."""
    return [tensor.to_local() for tensor in state["model"].values()]


def local_bytes(state: dict[str, dict[str, DTensor]]) -> int:
    return sum(tensor.nbytes for tensor in local_tensors(state))
