"""Two steps of four micro-batches under each strategy, with their collectives.

test_engine_collectives.py runs it as ranks. The script counts the collectives of each backward, and returns what the
trained model makes of fixed inputs. RANK_SETTINGS comes from the test. Rank 0 writes the results of each case as
JSON.
"""

import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

RANK_SETTINGS: dict[str, Any] = globals()["RANK_SETTINGS"]
os.environ.update(RANK_SETTINGS["environment"])

import torch  # noqa: E402
import torch.distributed as dist  # noqa: E402
from torch import nn  # noqa: E402

from no_pickles import refuse_pickles  # noqa: E402
from spottrain.data.batch import BatchPlan  # noqa: E402
from spottrain.engines.blocks import find_blocks, prepare_blocks  # noqa: E402
from spottrain.engines.choice import choose_engine  # noqa: E402
from spottrain.engines.engine import EngineConfig  # noqa: E402
from spottrain_api.settings.training import DeepSpeedConfig, FsdpConfig  # noqa: E402

torch.set_num_threads(1)
refuse_pickles()
RANK, WORLD, LOCAL = (int(os.environ[name]) for name in ("RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE"))
WIDTH, BATCH, MICRO_BATCHES = 16, 2, 4


class Model(nn.Module):
    """Two blocks and a head, gathered as three.

    It also has a scalar, which FSDP2 leaves whole.
    """

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()) for _ in range(2))
        self.head = nn.Linear(WIDTH, WIDTH)
        self.scale = nn.Parameter(torch.tensor(0.9))

    def forward(self, x: torch.Tensor, number: int) -> torch.Tensor:
        for block in self.blocks:
            x = x + block(x)
        return self.head(x) * self.scale


class Partly(Model):
    """A model that uses only some of its parts in a micro-batch.

    It chooses an expert by the number of the micro-batch and by the rank, and never uses one of them. It skips the
    second block in the last micro-batch.
    """

    def __init__(self) -> None:
        super().__init__()
        self.experts = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(MICRO_BATCHES + 1))

    def forward(self, x: torch.Tensor, number: int) -> torch.Tensor:
        for block in self.blocks[: 1 if number == MICRO_BATCHES - 1 else 2]:
            x = x + block(x)
        x = x + self.experts[(RANK + number) % MICRO_BATCHES](x)
        return self.head(x) * self.scale


def micro_batches() -> Iterator[tuple[torch.Tensor, float]]:
    """Samples, and how much their mean loss weighs: the last of rank 3 are left over."""
    generator = torch.Generator().manual_seed(RANK)
    for number in range(MICRO_BATCHES):
        is_left_over = RANK == WORLD - 1 and number == MICRO_BATCHES - 1
        yield torch.randn(BATCH, WIDTH, generator=generator), 0.0 if is_left_over else 1 / MICRO_BATCHES


def collectives() -> int:
    """How many this rank has begun with ranks of the other node."""
    groups = dist.distributed_c10d._world.pg_map
    nodes = {group: {rank // LOCAL for rank in dist.get_process_group_ranks(group)} for group in groups}
    return sum(group._get_sequence_number_for_group() for group in groups if len(nodes[group]) > 1)  # type: ignore[attr-defined]


def run(case: dict[str, Any]) -> dict[str, Any]:
    torch.manual_seed(0)
    model = Partly() if case.get("uses_parts", False) else Model()
    prepare_blocks(model, find_blocks(model), compiled=False, checkpointed=case.get("checkpointed", False))
    plan = BatchPlan(global_batch=WORLD * BATCH * MICRO_BATCHES - BATCH, micro_batch=BATCH, world_size=WORLD)
    config = EngineConfig(
        device=torch.device("cpu"),
        plan=plan,
        local_world_size=LOCAL,
        precision={"fp32": torch.float32, "bf16": torch.bfloat16}[case.get("precision", "fp32")],
        clip_grad_norm=0.5,
        fsdp=FsdpConfig(**case.get("fsdp", {})),
        deepspeed=DeepSpeedConfig(zero_stage=case.get("zero_stage")),
    )
    engine = choose_engine(case["strategy"], config)
    spread, _ = engine.wrap(model, lambda m: torch.optim.AdamW(m.parameters(), lr=1e-2))
    steps = []
    for _ in range(2):
        counted = []
        for number, (samples, weight) in enumerate(micro_batches()):
            engine.begin_micro_batch(is_last=number == MICRO_BATCHES - 1)
            loss = spread(samples, number).square().mean()
            before = collectives()
            engine.backward(loss * weight)
            counted.append(collectives() - before)
        steps.append(counted)
        engine.update()
    with torch.no_grad():
        outputs = [spread(torch.eye(WIDTH), number) for number in range(MICRO_BATCHES)]
    return {"collectives": steps, "outputs": torch.stack(outputs).flatten().tolist()}


dist.init_process_group("gloo")
results = {case["name"]: run(case) for case in RANK_SETTINGS["cases"]}
if RANK == 0:
    Path(RANK_SETTINGS["result"]).write_text(json.dumps(results))
dist.barrier()
dist.destroy_process_group()
