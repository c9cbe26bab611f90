"""Every model under every strategy, at one world size after the other.

test_odd_models.py runs it as ranks. RANK_SETTINGS comes from the test. Every run leaves its state in commits, and
rank 0 writes losses and errors as JSON.
"""

import json
import os
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

RANK_SETTINGS: dict[str, Any] = globals()["RANK_SETTINGS"]
os.environ.update(RANK_SETTINGS["environment"])

import torch  # noqa: E402
import torch.distributed as dist  # noqa: E402
from torch import nn  # noqa: E402
from torch.nn import functional  # noqa: E402

from awkward_models import SharingBlock  # noqa: E402
from no_pickles import refuse_pickles  # noqa: E402
from process_groups import groups_of_its_own  # noqa: E402
from spottrain.checkpoint.checkpointer import Checkpointer  # noqa: E402
from spottrain.checkpoint.stores.uri import open_storage  # noqa: E402
from spottrain.data.batch import BatchPlan  # noqa: E402
from spottrain.engines.choice import choose_engine  # noqa: E402
from spottrain.engines.engine import EngineConfig  # noqa: E402
from spottrain.world.failures import UserError  # noqa: E402
from spottrain_api.settings.training import DeepSpeedConfig  # noqa: E402

torch.set_num_threads(1)
refuse_pickles()
RANK, WORLD = (int(os.environ[name]) for name in ("RANK", "WORLD_SIZE"))
BATCH, MICRO_BATCHES, WIDTH, CONTEXT, CLASSES, STEPS = 2, 4, 8, 5, 12, 4


class Experts(nn.Module):
    """Experts, of which each sample goes to one.

    So a rank uses different ones in every micro-batch. The last expert is never used. A branch is only taken for some
    samples.
    """

    def __init__(self) -> None:
        super().__init__()
        self.tokens = nn.Embedding(CLASSES, WIDTH)
        self.blocks = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(2))
        self.experts = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(5))
        self.branch = nn.Linear(WIDTH, WIDTH)
        self.head = nn.Linear(WIDTH, CLASSES)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.tokens(ids).mean(dim=1)
        for block in self.blocks:
            x = torch.tanh(block(x))
        if int(ids[0, 0]) % 3 == 0:
            x = x + torch.tanh(self.branch(x))
        return self.head(torch.stack([self.experts[int(i)](h) for i, h in zip(ids[:, 1] % 4, x, strict=True)]))


class Balanced(Experts):
    """A part of the loss, and with it a parameter, isn't in what forward returns."""

    def __init__(self) -> None:
        super().__init__()
        self.router = nn.Linear(WIDTH, 4)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        self.extra_loss = self.router(self.tokens(ids).mean(dim=1)).square().mean()
        return super().forward(ids)


class Branches(nn.Module):
    """Two layers, of which each micro-batch goes through one.

    So ranks may use different ones at the same time.
    """

    def __init__(self) -> None:
        super().__init__()
        self.tokens = nn.Embedding(CLASSES, WIDTH)
        self.branches = nn.ModuleList(nn.Linear(WIDTH, CLASSES) for _ in range(2))

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return self.branches[int(ids[0, 0]) % 2](self.tokens(ids).mean(dim=1))


class EmbeddingOnly(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.tokens = nn.Embedding(CLASSES, CLASSES)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return self.tokens(ids).mean(dim=1)


class Convolutions(nn.Module):
    """Batch norms, with their statistics."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            *(nn.Conv1d(1, 4, 3, bias=False), nn.BatchNorm1d(4), nn.ReLU()),
            *(nn.Conv1d(4, 4, 2, bias=False), nn.BatchNorm1d(4, affine=False), nn.Flatten(), nn.Linear(8, CLASSES)),
        )

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return self.layers(ids.unsqueeze(1) / CLASSES)


class GiantEmbedding(nn.Module):
    """Nearly all of the model, and of a size that no number of ranks divides."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens = nn.Embedding(5003, 3, padding_idx=0)
        self.head = nn.Linear(3, CLASSES)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return self.head(self.tokens(ids * 401).mean(dim=1))


class Adapted(nn.Module):
    """A frozen backbone with a low-rank adapter."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens = nn.Embedding(CLASSES, WIDTH)
        self.blocks = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(3))
        self.requires_grad_(False)
        self.down = nn.Linear(WIDTH, 2, bias=False)
        self.up = nn.Linear(2, CLASSES)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.tokens(ids).mean(dim=1)
        for block in self.blocks:
            x = torch.tanh(block(x))
        return self.up(self.down(x))


class OneScalar(nn.Module):
    """Buffers, and one parameter without dimensions."""

    table: torch.Tensor
    seen: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("table", torch.randn(CLASSES, CLASSES))
        self.register_buffer("seen", torch.zeros((), dtype=torch.long))
        self.scale = nn.Parameter(torch.tensor(0.5))

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        self.seen += 1
        return self.table[ids].mean(dim=1) * self.scale


class Tied(nn.Module):
    """The head has the embedding's weight, and the blocks share a layer."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens = nn.Embedding(CLASSES, WIDTH)
        shared = nn.Linear(WIDTH, WIDTH)
        self.blocks = nn.ModuleList(SharingBlock(shared) for _ in range(3))
        self.head = nn.Linear(WIDTH, CLASSES, bias=False)
        self.head.weight = self.tokens.weight

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.tokens(ids).mean(dim=1)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


class Spectral(nn.Module):
    """Its first parameter is complex."""

    def __init__(self) -> None:
        super().__init__()
        self.filter = nn.Parameter(torch.randn(CONTEXT, dtype=torch.complex64))
        self.head = nn.Linear(CONTEXT, CLASSES)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return self.head(torch.fft.ifft(torch.fft.fft(ids / CLASSES) * self.filter).real)


class InDouble(nn.Module):
    """Its first parameter is a float64."""

    def __init__(self) -> None:
        super().__init__()
        self.offset = nn.Parameter(torch.randn(CONTEXT, dtype=torch.float64))
        self.head = nn.Linear(CONTEXT, CLASSES)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return self.head((ids / CLASSES + self.offset).float())


class HalfBlocks(nn.Module):
    """Blocks in bf16, but for their norms."""

    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norm = nn.LayerNorm(WIDTH)
            self.linear = nn.Linear(WIDTH, WIDTH, dtype=torch.bfloat16)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x + torch.tanh(self.linear(self.norm(x).bfloat16()).float())

    def __init__(self) -> None:
        super().__init__()
        self.tokens = nn.Embedding(CLASSES, WIDTH)
        self.blocks = nn.ModuleList(self.Block() for _ in range(2))
        self.head = nn.Linear(WIDTH, CLASSES)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.tokens(ids).mean(dim=1)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


class HalfLayers(nn.Module):
    """Layers in bf16 and a norm in fp32, for a run in bf16."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens = nn.Embedding(CLASSES, WIDTH, dtype=torch.bfloat16)
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WIDTH, dtype=torch.bfloat16)) for _ in range(2)
        )
        self.head = nn.Linear(WIDTH, CLASSES)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.tokens(ids).mean(dim=1)
        for block in self.blocks:
            x = x + torch.tanh(block(x))
        return self.head(x)


class Quantized(nn.Module):
    """Frozen weights of eight bits, with scales and an adapter beside them."""

    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.randint(-9, 9, (WIDTH, WIDTH), dtype=torch.int8), requires_grad=False)
            self.scale = nn.Parameter(torch.full((WIDTH,), 0.1))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x + torch.tanh(x @ (self.weight.to(x.dtype) * self.scale))

    def __init__(self) -> None:
        super().__init__()
        self.tokens = nn.Embedding(CLASSES, WIDTH)
        self.blocks = nn.ModuleList(self.Block() for _ in range(2))
        self.head = nn.Linear(WIDTH, CLASSES)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.tokens(ids).mean(dim=1)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


class Empty(nn.Module):
    """A parameter with no elements, as a list of prompts that has none."""

    def __init__(self) -> None:
        super().__init__()
        self.prompts = nn.Parameter(torch.empty(0, WIDTH))
        self.tokens = nn.Embedding(CLASSES, WIDTH)
        self.blocks = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(2))
        self.blocks[0].extra = nn.Parameter(torch.empty(0))
        self.head = nn.Linear(WIDTH, CLASSES)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = torch.cat([self.prompts.expand(len(ids), -1, -1), self.tokens(ids)], dim=1).mean(dim=1)
        for block in self.blocks:
            x = torch.tanh(block(x))
        return self.head(x)


MODELS: dict[str, Callable[[], nn.Module]] = {
    **{
        "branches": Branches,
        "experts": Experts,
        "balanced experts": Balanced,
        "embedding only": EmbeddingOnly,
        "convolutions": Convolutions,
        "tied": Tied,
    },
    **{"giant embedding": GiantEmbedding, "adapted": Adapted, "one scalar": OneScalar, "complex": Spectral},
    **{
        "double": InDouble,
        "norms in fp32": HalfBlocks,
        "layers in bf16": HalfLayers,
        "eight bits": Quantized,
        "no elements": Empty,
    },
}


def samples(step: int) -> Iterator[torch.Tensor]:
    """This rank's micro-batches.

    All ranks together have the same ones at any world size.
    """
    generator = torch.Generator().manual_seed(step)
    every = [torch.randint(0, CLASSES, (BATCH, CONTEXT), generator=generator) for _ in range(MICRO_BATCHES)]
    share = MICRO_BATCHES // WORLD
    yield from every[RANK * share : (RANK + 1) * share]


class Run:
    """A model under an engine, with the whole mean loss of each step."""

    def __init__(self, strategy: str, model: str) -> None:
        torch.manual_seed(0)
        name, _, stage = strategy.partition(" ")
        config = EngineConfig(
            device=torch.device("cpu"),
            plan=BatchPlan(global_batch=BATCH * MICRO_BATCHES, micro_batch=BATCH, world_size=WORLD),
            precision=torch.bfloat16 if model == "layers in bf16" else torch.float32,
            clip_grad_norm=0.5,
            deepspeed=DeepSpeedConfig(zero_stage=int(stage) if stage else None),
        )
        self.engine = choose_engine(name, config)
        self.plain = MODELS[model]()
        self.model, _ = self.engine.wrap(self.plain, _adamw)
        self.losses: list[float] = []

    def train(self, first: int, last: int) -> None:
        share = MICRO_BATCHES // WORLD
        for step in range(first, last):
            total = torch.zeros(())
            for index, ids in enumerate(samples(step)):
                self.engine.begin_micro_batch(is_last=index == share - 1)
                loss = functional.cross_entropy(self.model(ids), ids[:, 0])
                loss = loss + getattr(self.plain, "extra_loss", 0.0)
                self.engine.backward(loss / share)
                total += loss.detach() / MICRO_BATCHES
            self.engine.update()
            dist.all_reduce(total)
            self.losses.append(float(total))

    def save(self, uri: str, step: int) -> None:
        checkpointer = _checkpointer(uri)
        checkpointer.latest()
        assert checkpointer.save(self.engine.state(), step=step).commit is not None

    def load(self, uri: str) -> None:
        checkpointer = _checkpointer(uri)
        newest = checkpointer.latest()
        assert newest is not None
        self.engine.load_state(checkpointer.load(self.engine.room, newest).state)


def _adamw(model: nn.Module) -> torch.optim.Optimizer:
    """As on accelerators, with many parameters at once."""
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    return torch.optim.AdamW(trained, lr=1e-2, weight_decay=0.1, foreach=True)


def _checkpointer(uri: str) -> Checkpointer:
    return Checkpointer(
        open_storage(uri), generation=1, attempt_id="a", rank=RANK, world_size=WORLD, process_group=dist.group.WORLD
    )


def run(model: str, strategy: str) -> dict[str, Any]:
    """Train undisturbed, then up to half, and on from each half that is there.

    A half may come from any world size.
    """
    folder = f"{RANK_SETTINGS['folder']}/{model}/{strategy}"
    found: dict[str, Any] = {}
    if RANK_SETTINGS["begins"]:
        steady, begun = Run(strategy, model), Run(strategy, model)
        steady.train(0, STEPS)
        steady.save(f"file://{folder}/steady-{WORLD}", STEPS)
        found["losses"] = steady.losses
        begun.train(0, STEPS // 2)
        begun.save(f"file://{folder}/half-{WORLD}", STEPS // 2)
    for before in RANK_SETTINGS["resumes"]:
        resumed = Run(strategy, model)
        resumed.load(f"file://{folder}/half-{before}")
        resumed.train(STEPS // 2, STEPS)
        resumed.save(f"file://{folder}/resumed-{before}-{WORLD}", STEPS)
    return found


dist.init_process_group("gloo")
results: dict[str, dict[str, Any]] = {}
for model, strategy in RANK_SETTINGS["cases"]:
    try:
        with groups_of_its_own():
            results[f"{model}, {strategy}"] = run(model, strategy)
    except UserError as error:
        results[f"{model}, {strategy}"] = {"refused": str(error)}
    except Exception:
        results[f"{model}, {strategy}"] = {"error": traceback.format_exc()}
        break  # the other ranks may be in another collective by now
if RANK == 0:
    Path(RANK_SETTINGS["result"]).write_text(json.dumps(results))
dist.barrier()
dist.destroy_process_group()
