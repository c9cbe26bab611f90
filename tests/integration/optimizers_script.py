"""What test_optimizers.py runs as ranks.

Every optimizer trains under every strategy. Its first step is skipped. A commit is made in the middle, and a second
engine goes on from it. RANK_SETTINGS comes from the test. Rank 0 writes the results of each case as JSON.
"""

import json
import os
import traceback
from functools import cache
from pathlib import Path
from typing import Any

RANK_SETTINGS: dict[str, Any] = globals()["RANK_SETTINGS"]
os.environ.update(RANK_SETTINGS["environment"])

import torch  # noqa: E402
import torch.distributed as dist  # noqa: E402
from torch import nn  # noqa: E402

from optimizer_kinds import KINDS  # noqa: E402
from process_groups import groups_of_its_own  # noqa: E402
from spottrain.checkpoint.checkpointer import Checkpointer  # noqa: E402
from spottrain.checkpoint.errors import CheckpointError  # noqa: E402
from spottrain.checkpoint.stores.uri import open_storage  # noqa: E402
from spottrain.data.batch import BatchPlan  # noqa: E402
from spottrain.engines.choice import choose_engine  # noqa: E402
from spottrain.engines.engine import EngineConfig  # noqa: E402
from spottrain.engines.model_state import full_state  # noqa: E402
from spottrain.loop.acceptance import checked_optimizer  # noqa: E402
from spottrain.world.failures import UserError  # noqa: E402
from spottrain_api.settings.training import DeepSpeedConfig  # noqa: E402

torch.set_num_threads(1)
RANK, WORLD = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
BATCH, STEPS, MIDDLE = 4, 5, 3
GENERATION = 1 if RANK_SETTINGS["begins"] else 2


class Model(nn.Module):
    """Sizes that don't divide, a scalar, and a vector of which one rank has nothing."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(5, 6), nn.Tanh(), nn.Linear(6, 3))
        self.scale = nn.Parameter(torch.tensor(1.5))
        self.offset = nn.Parameter(torch.full((1,), 0.5))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layers(x) * self.scale + self.offset


def batch(step: int) -> torch.Tensor:
    return torch.randn(BATCH, 5, generator=torch.Generator().manual_seed(step))


def built() -> Model:
    torch.manual_seed(0)
    return Model()


class Run:
    """A model under an engine."""

    def __init__(self, kind: str, strategy: str) -> None:
        name, _, stage = strategy.partition(" ")
        config = EngineConfig(
            device=torch.device("cpu"),
            plan=BatchPlan(global_batch=BATCH, micro_batch=BATCH // WORLD, world_size=WORLD),
            deepspeed=DeepSpeedConfig(zero_stage=int(stage) if stage else None),
        )
        self.engine = choose_engine(name, config)
        make = checked_optimizer(lambda model: KINDS[kind](list(model.parameters())))
        self.model, self.optimizer = self.engine.wrap(built(), make)
        enter_train_mode(self.optimizer)

    def train(self, first: int, last: int) -> None:
        for step in range(first, last):
            self.engine.begin_micro_batch(is_last=True)
            self.engine.backward(self.model(batch(step)[RANK::WORLD]).square().mean())
            if step == 0:
                self.engine.discard()
            else:
                self.engine.update()

    def weights(self) -> dict[str, torch.Tensor]:
        return full_state(self.engine.model_state(), keep=True)


@cache
def plain(kind: str) -> dict[str, torch.Tensor]:
    model = built()
    optimizer = KINDS[kind](list(model.parameters()))
    enter_train_mode(optimizer)
    for step in range(1, STEPS):
        optimizer.zero_grad()
        model(batch(step)).square().mean().backward()
        optimizer.step()
    return {name: value.detach() for name, value in model.state_dict().items()}


def enter_train_mode(optimizer: torch.optim.Optimizer) -> None:
    if hasattr(optimizer, "train"):
        optimizer.train()


def checkpointer_of(kind: str, strategy: str) -> Checkpointer:
    storage = open_storage(f"file://{RANK_SETTINGS['folder']}/{kind}/{strategy}")
    return Checkpointer(
        storage, generation=GENERATION, attempt_id="a", rank=RANK, world_size=WORLD, process_group=dist.group.WORLD
    )


def resumed(kind: str, strategy: str) -> Run:
    run, checkpointer = Run(kind, strategy), checkpointer_of(kind, strategy)
    newest = checkpointer.latest()
    assert newest is not None
    run.engine.load_state(checkpointer.load(run.engine.room, newest).state)
    run.train(newest.step, STEPS)
    return run


def run(kind: str, strategy: str) -> dict[str, Any]:
    found: dict[str, dict[str, torch.Tensor]] = {}
    if RANK_SETTINGS["begins"]:
        steady, checkpointer = Run(kind, strategy), checkpointer_of(kind, strategy)
        checkpointer.latest()
        steady.train(0, 2)
        # As after the first update.
        checkpointer.prepare(steady.engine.state(), trial=steady.engine.try_load)
        steady.train(2, MIDDLE)
        checkpointer.save(steady.engine.state(), step=MIDDLE)
        steady.train(MIDDLE, STEPS)
        found["steady"] = steady.weights()
    found["resumed"] = resumed(kind, strategy).weights()
    wanted = plain(kind)
    same = {name: torch.equal(value, found["resumed"][name]) for name, value in found.get("steady", {}).items()}
    return {
        "differs": [name for name, is_same in same.items() if not is_same],
        "far": [
            f"{way} {name}: {values[name].tolist()} instead of {value.tolist()}"
            for way, values in found.items()
            for name, value in wanted.items()
            if not torch.allclose(values[name], value, rtol=1e-4, atol=1e-5)
        ],
    }


dist.init_process_group("gloo")
results: dict[str, dict[str, Any]] = {}
for kind, strategy in RANK_SETTINGS["cases"]:
    try:
        with groups_of_its_own():
            results[f"{kind}, {strategy}"] = run(kind, strategy)
    except (UserError, CheckpointError) as error:
        results[f"{kind}, {strategy}"] = {"refused": str(error)}
    except Exception:
        results[f"{kind}, {strategy}"] = {"error": traceback.format_exc()}
        break  # the other ranks may be in another collective by now
if RANK == 0:
    Path(RANK_SETTINGS["result"]).write_text(json.dumps(results))
dist.barrier()
dist.destroy_process_group()
