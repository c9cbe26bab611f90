"""A model under each strategy, treated as people's scripts treat theirs.

test_script_habits.py runs it as ranks. RANK_SETTINGS comes from the test. Each rank writes the results of each habit
as JSON.
"""

import copy
import json
import os
import traceback
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

RANK_SETTINGS: dict[str, Any] = globals()["RANK_SETTINGS"]
os.environ.update(RANK_SETTINGS["environment"])

import deepspeed  # noqa: E402
import torch  # noqa: E402
import torch.distributed as dist  # noqa: E402
from torch import nn  # noqa: E402
from torch.distributed.tensor import DTensor  # noqa: E402
from torch.utils.checkpoint import checkpoint  # noqa: E402

from process_groups import groups_of_its_own  # noqa: E402
from spottrain.data.batch import BatchPlan  # noqa: E402
from spottrain.engines.choice import choose_engine  # noqa: E402
from spottrain.engines.engine import EngineConfig  # noqa: E402
from spottrain.engines.structure import check_same_model  # noqa: E402
from spottrain.world.failures import UserError  # noqa: E402
from spottrain_api.settings.training import DeepSpeedConfig, FsdpConfig  # noqa: E402

torch.set_num_threads(1)
RANK, WORLD, LOCAL = (int(os.environ[name]) for name in ("RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE"))
WIDTH, CLIP = 4, 0.5
STRATEGIES = ("ddp", "fsdp", "deepspeed")


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


class Shared(nn.Module):
    """One block that is used three times, recomputed in backward passes inside the backward pass."""

    def __init__(self) -> None:
        super().__init__()
        self.first, block = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.blocks = nn.ModuleList([block] * 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x)
        for block in self.blocks:
            x = torch.tanh(checkpoint(block, x, use_reentrant=True))
        return x


class Changing(Model):
    """Its buffers change in the first forward pass, in a different way on each rank."""

    def __init__(self, change: str) -> None:
        super().__init__()
        self.change = change
        self.register_buffer("extra", torch.zeros(WIDTH))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        match self.change:
            case "order":
                for name in "ab" if RANK == 0 else "ba":
                    self.register_buffer(name, torch.zeros(WIDTH))
            case "length":
                self.extra = torch.zeros(1 + RANK)
            case "type":
                self.extra = torch.zeros(WIDTH, dtype=torch.float64 if RANK == 0 else torch.float32)
            case "one rank" if RANK == 1:
                self.register_buffer("late", torch.zeros(2))
        return super().forward(x)


class InTurns(nn.Module):
    """Two networks, of which each step trains one."""

    def __init__(self) -> None:
        super().__init__()
        self.maker, self.judge = (nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()) for _ in range(2))
        self.turn = "judge"

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.turn == "judge":
            return self.judge(x) - self.judge(self.maker(x).detach())
        return self.judge(self.maker(x))

    def rest(self) -> None:
        """As scripts do it for the network that has received gradients without being trained."""
        for parameter in self.judge.parameters() if self.turn == "maker" else []:
            parameter.grad = None
        self.turn = "maker" if self.turn == "judge" else "judge"


class Taught(Model):
    """With a teacher, which the script lets follow."""

    def __init__(self) -> None:
        super().__init__()
        self.teacher = copy.deepcopy(self.blocks).requires_grad_(False)


class Script:
    def __init__(
        self,
        strategy: str,
        model: nn.Module,
        precision: torch.dtype = torch.float32,
        zero: DeepSpeedConfig | None = None,
        **fsdp: Any,
    ) -> None:
        config = EngineConfig(
            device=torch.device("cpu"),
            plan=BatchPlan(global_batch=2 * WORLD, micro_batch=2, world_size=WORLD),
            local_world_size=LOCAL,
            clip_grad_norm=CLIP,
            precision=precision,
            fsdp=FsdpConfig(**fsdp),
            deepspeed=zero or DeepSpeedConfig(zero_stage=2),
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


def between(strategy: str, *, evaluates: str, **fsdp: Any) -> list[list[float]]:
    """An evaluation before the update, or before its state is read."""
    torch.manual_seed(0)
    script = Script(strategy, Model(), **fsdp)

    def evaluate(when: str) -> None:
        if when in evaluates:
            with torch.no_grad():
                script.model(torch.ones(2, WIDTH))

    for step in range(3):
        script.engine.begin_micro_batch(is_last=True)
        spoiled = torch.nan if step == 1 else 1.0
        script.engine.backward(script.model(torch.full((2, WIDTH), float(RANK))).sum() * spoiled)
        evaluate("before")
        assert script.engine.gradients_are_finite() == (step != 1)
        script.engine.discard() if step == 1 else script.engine.update()
        evaluate("after")
        state = script.engine.state()
        evaluate("after")
        assert script.engine.frozen() == set()
        script.engine.load_state(state)
    return script.values()


def in_turns(strategy: str) -> list[list[float]]:
    torch.manual_seed(0)
    model = InTurns()
    script = Script(strategy, model)
    for step in range(4):
        script.engine.begin_micro_batch(is_last=True)
        script.engine.backward(script.model(_rows(step, RANK)).mean())
        model.rest()
        script.engine.update()
    return script.values()


def in_turns_plainly() -> list[list[float]]:
    torch.manual_seed(0)
    model = InTurns()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    for step in range(4):
        model(torch.cat([_rows(step, rank) for rank in range(WORLD)])).mean().backward()
        model.rest()
        torch.nn.utils.clip_grad_norm_(model.parameters(), CLIP)
        optimizer.step()
        optimizer.zero_grad()
    return [each.flatten().tolist() for each in model.parameters()]


def _rows(step: int, rank: int) -> torch.Tensor:
    return torch.randn(2, WIDTH, generator=torch.Generator().manual_seed(10 * step + rank))


def one_step(strategy: str, make: Callable[[], nn.Module]) -> list[list[float]]:
    script = Script(strategy, make())
    script.step()
    return script.values()


def taught(by: str, *, persistent: int = 0, stage: int = 3) -> list[list[float]]:
    """Two steps under ZeRO, after each of which the teacher follows. The values are the teacher's."""
    torch.manual_seed(0)
    config = {"zero_optimization": {"stage3_param_persistence_threshold": persistent}} if stage == 3 else {}
    model = Taught()
    script = Script("deepspeed", model, zero=DeepSpeedConfig(zero_stage=stage, config=config))
    pairs = list(zip(model.teacher.parameters(), model.blocks.parameters(), strict=True))
    for _ in range(2):
        script.step()
        match by:
            case "library":
                script.engine.update_average(model.teacher, model.blocks, 0.5)
            case "script":
                with torch.no_grad():
                    for average, source in pairs:
                        average.lerp_(source, 0.5)
            case "deepspeed":
                for average, source in pairs:
                    with deepspeed.zero.GatheredParameters([average, source], modifier_rank=0), torch.no_grad():
                        average.lerp_(source, 0.5)
    state = script.engine.model_state()
    return [
        (value.full_tensor() if hasattr(value, "full_tensor") else value).flatten().tolist()
        for name, value in state.items()
        if name.startswith("teacher")
    ]


def taught_in_bf16(stage: int) -> list[list[float]]:
    model = Taught()
    script = Script("deepspeed", model, precision=torch.bfloat16, zero=DeepSpeedConfig(zero_stage=stage))
    script.engine.update_average(model.teacher, model.blocks, 0.5)
    return []


def different_models() -> list[list[float]]:
    model = Model()
    if RANK == 1:
        model.blocks.append(nn.Linear(WIDTH, WIDTH))
    check_same_model(model)
    return []


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
    "evaluated nowhere, kept": lambda: between("fsdp", evaluates="", reshard_after_forward=False),
    "evaluated before the update, kept": lambda: between("fsdp", evaluates="before", reshard_after_forward=False),
    "evaluated after the update, kept": lambda: between("fsdp", evaluates="after", reshard_after_forward=False),
    **{f"nested backward, {name}": partial(one_step, name, Shared) for name in STRATEGIES},
    "in turns, plain": in_turns_plainly,
    **{f"in turns, {name}": partial(in_turns, name) for name in STRATEGIES},
    **{
        f"buffers of another {change}, {name}": partial(one_step, name, partial(Changing, change))
        for change in ("order", "length", "type", "one rank")
        for name in STRATEGIES
    },
    "different models": different_models,
    "taught by the script, zero 3": partial(taught, "script"),
    "taught by the script, zero 3 with whole parameters": partial(taught, "script", persistent=10_000),
    "taught by the script, zero 2": partial(taught, "script", stage=2),
    "taught by deepspeed, zero 3": partial(taught, "deepspeed"),
    **{f"taught by the library, zero {stage}": partial(taught, "library", stage=stage) for stage in (1, 2, 3)},
    "taught by the library, zero 3 with whole parameters": partial(taught, "library", persistent=10_000),
    **{f"taught by the library in bf16, zero {stage}": partial(taught_in_bf16, stage) for stage in (1, 3)},
}

dist.init_process_group("gloo")
results: dict[str, dict[str, Any]] = {}
for name in RANK_SETTINGS["habits"]:
    try:
        with groups_of_its_own():
            results[name] = {"values": HABITS[name]()}
    except UserError as error:
        results[name] = {"refused": str(error)}
    except Exception:
        results[name] = {"error": traceback.format_exc()}
        break  # the other ranks may be in another collective by now
Path(f"{RANK_SETTINGS['result']}-{RANK}").write_text(json.dumps(results))
dist.barrier()
dist.destroy_process_group()
