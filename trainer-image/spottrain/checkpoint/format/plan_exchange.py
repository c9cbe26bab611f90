"""How the ranks agree on a plan.

Each rank describes its items to rank 0, which answers which of them to write. DCP's own exchange pickles the plans.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex, TensorProperties
from torch.distributed.checkpoint.planner import SavePlan, TensorWriteData, WriteItem, WriteItemType

from spottrain import exchange
from spottrain.checkpoint.errors import UnsupportedState


def exchange_plans(
    local: SavePlan, planner: DefaultSavePlanner, rank: int, group: dist.ProcessGroup | None
) -> SavePlan:
    """What is left of this rank's plan. A collective.

    Raises:
        UnsupportedState: The ranks' plans don't fit together.
    """
    if group is None:
        return planner.create_global_plan([local])[0][0]
    described = exchange.gather([_description(item) for item in local.items], group)
    answer = exchange.scatter(_answers(planner, described) if described is not None else None, group)
    if isinstance(answer, str):
        raise UnsupportedState(answer)
    return SavePlan([local.items[number] for number in answer])


def _answers(planner: DefaultSavePlanner, described: list[Any]) -> list[list[int] | str]:
    """Return rank 0's answer to each rank.

    An answer has the numbers of the items that the rank writes. If the ranks' items don't fit together, it is the
    same sentence for all.
    """
    try:
        plans = [SavePlan([_item(each) for each in of_rank]) for of_rank in described]
        kept = [{item.index for item in plan.items} for plan in planner.create_global_plan(plans)[0]]
    except (ValueError, AssertionError) as error:
        # Every rank needs the error: the others wait for their plan.
        return [f"The ranks' tensors don't form one consistent state: {error}"] * len(described)
    return [
        [number for number, item in enumerate(plan.items) if item.index in of_rank]
        for plan, of_rank in zip(plans, kept, strict=True)
    ]


def _description(item: WriteItem) -> list[Any]:
    data = item.tensor_data
    assert data is not None  # only tensors are planned
    chunk = data.chunk
    dtype = str(data.properties.dtype).removeprefix("torch.")
    return [item.index.fqn, item.type.name, dtype, list(data.size), list(chunk.offsets), list(chunk.sizes)]


def _item(description: list[Any]) -> WriteItem:
    fqn, kind, name, size, offsets, sizes = description
    dtype = getattr(torch, name, None)
    if not isinstance(dtype, torch.dtype):
        raise ValueError(f"rank 0 doesn't know the dtype {name} of {fqn!r}")
    chunk = ChunkStorageMetadata(torch.Size(offsets), torch.Size(sizes))
    return WriteItem(
        index=MetadataIndex(fqn, chunk.offsets),
        type=WriteItemType[kind],
        tensor_data=TensorWriteData(chunk=chunk, properties=TensorProperties(dtype=dtype), size=torch.Size(size)),
    )
