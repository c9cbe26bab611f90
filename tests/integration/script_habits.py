"""A model under each strategy, treated as people's scripts treat theirs.

test_script_habits.py runs it as ranks. RANK_SETTINGS comes from the test. Each rank writes the results of each habit
as JSON.
"""

import json
import os
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

RANK_SETTINGS: dict[str, Any] = globals()["RANK_SETTINGS"]
os.environ.update(RANK_SETTINGS["environment"])

import torch  # noqa: E402
import torch.distributed as dist  # noqa: E402
from torch import nn  # noqa: E402
from torch.distributed.tensor import DTensor  # noqa: E402

from spottrain.data.batch import BatchPlan  # noqa: E402
from spottrain.engines.choice import choose_engine  # noqa: E402
from spottrain.engines.engine import EngineConfig  # noqa: E402
from spottrain.world.failures import UserError  # noqa: E402
from spottrain_api.settings.training import DeepSpeedConfig, FsdpConfig  # noqa: E402

torch.set_num_threads(1)
RANK, WORLD, LOCAL = (int(os.environ[name]) for name in ("RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE"))
WIDTH = 4


class Model(nn.Module):
    """Blocks, a parameter that can't be sharded, and a buffer."""

    offset: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(2))
        self.scale = nn.Parameter(torch.randn(()))
        self.register_buffer("offset", torch.randn(WIDTH))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = torch.tanh(block(x + self.offset))
        return x * self.scale


class RareTypes(Model):
    """A frozen weight and buffers of types that DDP can't send."""

    def __init__(self) -> None:
        super().__init__()
        self.base = nn.Parameter(torch.randn(WIDTH).to(torch.float8_e4m3fn), requires_grad=False)
        self.register_buffer("codes", torch.randint(-99, 99, (WIDTH,), dtype=torch.int16))
        self.register_buffer(
            "table", torch.randint(99, (WIDTH,), dtype=torch.int32).to(torch.uint32), persistent=False
        )


class Script:
    def __init__(self, strategy: str, model: nn.Module, **fsdp: Any) -> None:
        config = EngineConfig(
            device=torch.device("cpu"),
            plan=BatchPlan(global_batch=2 * WORLD, micro_batch=2, world_size=WORLD),
            local_world_size=LOCAL,
            fsdp=FsdpConfig(**fsdp),
            deepspeed=DeepSpeedConfig(zero_stage=2),
        )
        self.engine = choose_engine(strategy, config)
        self.model, _ = self.engine.wrap(model, lambda m: torch.optim.AdamW(m.parameters(), lr=0.1))

    def step(self) -> None:
        self.engine.begin_micro_batch(is_last=True)
        self.engine.backward(self.model(torch.full((2, WIDTH), float(RANK))).sum())
        self.engine.update()

    def values(self) -> list[list[float]]:
        """Of all parameters and buffers."""
        every = [*self.model.parameters(), *self.model.buffers()]
        wholes = [each.full_tensor() if isinstance(each, DTensor) else each for each in every]
        return [whole.flatten().tolist() for whole in wholes]


def seeded_by_rank(strategy: str, make: Callable[[], nn.Module] = Model, **fsdp: Any) -> list[list[float]]:
    torch.manual_seed(RANK)
    script = Script(strategy, make(), **fsdp)
    return script.values()


def hooked(strategy: str) -> list[list[float]]:
    """The model has hooks that are made for what it is called with and returns."""
    torch.manual_seed(0)
    model = Model()
    model.register_forward_pre_hook(lambda _, args: (args[0][:, :WIDTH],))
    model.register_forward_hook(lambda _, args, output: output.float())
    script = Script(strategy, model)
    script.step()
    return script.values()


def evaluated(strategy: str, batches: int, **fsdp: Any) -> list[list[float]]:
    """After each step, with more batches on later ranks."""
    torch.manual_seed(0)
    script = Script(strategy, Model(), **fsdp)
    for _ in range(2):
        script.step()
        with torch.no_grad():
            for _ in range(batches * (RANK + 1)):
                script.model(torch.ones(2, WIDTH))
    return script.values()


def frozen_late(strategy: str, *, first: bool) -> list[list[float]]:
    torch.manual_seed(0)
    model = Model()
    model.blocks[0].requires_grad_(first)
    script = Script(strategy, model)
    script.step()
    before = script.values()[:3]
    model.blocks[0].requires_grad_(not first)
    script.step()
    return [before[1], script.values()[1]]  # the scale comes first, then the block's weight


HABITS: dict[str, Callable[[], list[list[float]]]] = {
    "seeded by rank, ddp": lambda: seeded_by_rank("ddp"),
    "seeded by rank, rare types, ddp": lambda: seeded_by_rank("ddp", RareTypes),
    "seeded by rank, fsdp": lambda: seeded_by_rank("fsdp"),
    "seeded by rank, hybrid": lambda: seeded_by_rank("fsdp", sharding="hybrid"),
    "hooked, ddp": lambda: hooked("ddp"),
    "hooked, fsdp": lambda: hooked("fsdp"),
    "not evaluated, fsdp": lambda: evaluated("fsdp", 0, reshard_after_forward=False),
    "evaluated, fsdp": lambda: evaluated("fsdp", 1, reshard_after_forward=False),
    "frozen, fsdp": lambda: frozen_late("fsdp", first=True),
    "unfrozen, fsdp": lambda: frozen_late("fsdp", first=False),
    "frozen, ddp": lambda: frozen_late("ddp", first=True),
    "unfrozen, ddp": lambda: frozen_late("ddp", first=False),
    "frozen, deepspeed": lambda: frozen_late("deepspeed", first=True),
    "unfrozen, deepspeed": lambda: frozen_late("deepspeed", first=False),
}

dist.init_process_group("gloo")
results: dict[str, dict[str, Any]] = {}
for name in RANK_SETTINGS["habits"]:
    try:
        results[name] = {"values": HABITS[name]()}
    except UserError as error:
        results[name] = {"refused": str(error)}
    except Exception:
        results[name] = {"error": traceback.format_exc()}
        break  # the other ranks may be in another collective by now
Path(f"{RANK_SETTINGS['result']}-{RANK}").write_text(json.dumps(results))
dist.barrier()
dist.destroy_process_group()
