"""Models of which some framework has failed on each kind, and the plain loop that says what is right for them."""

from __future__ import annotations

import copy
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence

import torch
from torch import nn
from torch.nn.utils.parametrizations import spectral_norm
from torch.nn.utils.prune import l1_unstructured
from torch.utils.checkpoint import checkpoint

# Two ranks, and three, have shards of different sizes, or one of them has none.
GLOBAL_BATCH, MICRO_BATCH, WIDTH, STEPS_A_WORLD = 12, 2, 5, 2
CLIP, DECAY = 1.0, 0.7
Sample = dict[str, torch.Tensor]


class Awkward(nn.Module, ABC):
    """A model that returns its loss, as those of Hugging Face do."""

    def forward(self, x: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
        """`x` has the shape `(batch, WIDTH)`, `labels` `(batch,)`."""
        return {"loss": (self.predict(x).squeeze(1) - labels).square().mean()}

    @abstractmethod
    def predict(self, x: torch.Tensor) -> torch.Tensor:
        """The predictions, of shape `(batch, 1)`."""


class BatchNorm(Awkward):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(WIDTH, 6), nn.BatchNorm1d(6), nn.Tanh(), nn.Linear(6, 1))

    def predict(self, x: torch.Tensor) -> torch.Tensor:
        return self.layers(x)


class Buffers(Awkward):
    """Buffers of several types; one follows the samples and is replaced, and others are not saved or have no size.

    Some share memory, or have their elements in another order. These are only read: moving a model to a device parts
    them.
    """

    mean: torch.Tensor
    seen: torch.Tensor
    mask: torch.Tensor
    scale: torch.Tensor
    whole: torch.Tensor
    part: torch.Tensor
    turned: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros(WIDTH))
        self.register_buffer("seen", torch.tensor(0))
        self.register_buffer("mask", torch.tensor([True, False, True, True, True]))
        self.register_buffer("codes", torch.arange(3, dtype=torch.int32))
        self.register_buffer("halves", torch.ones(3, dtype=torch.bfloat16))
        self.register_buffer("nothing", torch.empty(0))
        self.register_buffer("scale", torch.full((WIDTH,), 0.5), persistent=False)
        self.register_buffer("none", None)
        self.register_buffer("whole", torch.linspace(0, 1, 3 * WIDTH).view(3, WIDTH))
        self.register_buffer("part", self.whole[1])
        self.register_buffer("turned", torch.linspace(0, 1, 2 * WIDTH).view(WIDTH, 2).t())
        self.blocks = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(2))
        self.head = nn.Linear(WIDTH, 1)

    def predict(self, x: torch.Tensor) -> torch.Tensor:
        self.seen += len(x)
        self.mean = 0.9 * self.mean + 0.1 * x.detach().mean(dim=0)
        x = (x - self.mean) * self.scale * self.mask + self.part * self.turned[1]
        for block in self.blocks:
            x = torch.tanh(block(x))
        return self.head(x)


class SharingBlock(nn.Module):
    """A norm of its own, and a layer that other blocks have, too."""

    def __init__(self, shared: nn.Linear) -> None:
        super().__init__()
        self.shared = shared
        self.norm = nn.LayerNorm(shared.in_features)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + torch.tanh(self.shared(self.norm(x)))


class Tied(Awkward):
    """The head has the weight of the first layer, and the blocks share a layer."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(WIDTH, 1, bias=False)
        shared = nn.Linear(WIDTH, WIDTH)
        self.blocks = nn.ModuleList(SharingBlock(shared) for _ in range(2))
        self.head = nn.Linear(WIDTH, 1)
        self.head.weight = self.first.weight

    def predict(self, x: torch.Tensor) -> torch.Tensor:
        x = x + torch.tanh(self.first(x))
        for block in self.blocks:
            x = block(x)
        return self.head(x)


class Dropout(Awkward):
    """What it drops follows from the samples, so that it is the same on any number of ranks."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(WIDTH, 8), nn.Dropout(0.3), nn.Tanh(), nn.Linear(8, 1))

    def predict(self, x: torch.Tensor) -> torch.Tensor:
        with torch.random.fork_rng([]):
            torch.manual_seed(int(1e6 * x.abs().sum()))
            return self.layers(x)


class Doubles(Awkward):
    """Parameters and buffers of several types."""

    def __init__(self) -> None:
        super().__init__()
        self.offset = nn.Parameter(torch.zeros(WIDTH, dtype=torch.float64))
        self.table: torch.Tensor
        self.register_buffer("table", torch.ones(WIDTH, dtype=torch.float64))
        self.blocks = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(2))
        self.head = nn.Linear(WIDTH, 1)

    def predict(self, x: torch.Tensor) -> torch.Tensor:
        x = (x * self.table + self.offset).float()
        for block in self.blocks:
            x = torch.tanh(block(x))
        return self.head(x)


class Frozen(Awkward):
    """A frozen backbone with a norm, and an adapter."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(2))
        self.norm = nn.BatchNorm1d(WIDTH)
        self.requires_grad_(False)
        self.down = nn.Linear(WIDTH, 2, bias=False)
        self.up = nn.Linear(2, 1)

    def predict(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = torch.tanh(block(x))
        return self.up(self.down(self.norm(x)))


class Unused(Awkward):
    """A layer that is never used."""

    def __init__(self) -> None:
        super().__init__()
        self.never = nn.Linear(WIDTH, 1)
        self.blocks = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(2))
        self.head = nn.Linear(WIDTH, 1)

    def predict(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = torch.tanh(block(x))
        return self.head(x)


class UsedTwice(Awkward):
    """A block that is called twice, and a parameter that is used inside and outside of a block."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(2))
        self.scale = nn.Parameter(torch.ones(WIDTH))
        self.head = nn.Linear(WIDTH, 1)

    def predict(self, x: torch.Tensor) -> torch.Tensor:
        for block in (*self.blocks, *self.blocks):
            x = torch.tanh(block(x) * self.scale)
        return self.head(x * self.scale)


class Scalars(Awkward):
    """Parameters without dimensions, also in a block, one with a single element, and blocks without parameters."""

    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(WIDTH, WIDTH)
            self.gate = nn.Parameter(torch.tensor(0.5))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x + self.gate * torch.tanh(self.linear(x))

    def __init__(self) -> None:
        super().__init__()
        self.temperature = nn.Parameter(torch.tensor(0.9))
        self.one = nn.Parameter(torch.tensor([0.1]))
        self.blocks = nn.ModuleList([self.Block(), nn.Tanh(), self.Block(), nn.Identity()])
        self.head = nn.Linear(WIDTH, 1)

    def predict(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x)
        return self.head(x) / self.temperature + self.one


class Parametrized(Awkward):
    """A norm of weights whose buffers change in each forward pass of training."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([spectral_norm(nn.Linear(WIDTH, WIDTH)), nn.Linear(WIDTH, WIDTH)])
        self.head = nn.Linear(WIDTH, 1)

    def predict(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = torch.tanh(block(x))
        return self.head(x)


class Pruned(Awkward):
    """A weight that is computed from a parameter and a mask before each forward pass."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)])
        l1_unstructured(self.blocks[0], "weight", amount=0.5)
        self.head = nn.Linear(WIDTH, 1)

    def predict(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = torch.tanh(block(x))
        return self.head(x)


class Checkpointed(Awkward):
    """Blocks that are computed again in backward, with a table that is not saved, as in Llama."""

    def __init__(self) -> None:
        super().__init__()
        self.table: torch.Tensor
        self.register_buffer("table", torch.linspace(0, 1, WIDTH), persistent=False)
        self.blocks = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(2))
        self.head = nn.Linear(WIDTH, 1)

    def predict(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = torch.tanh(checkpoint(block, x + self.table, use_reentrant=False))
        return self.head(x)


class Averaged(Awkward):
    """A student, and a teacher that follows it by a moving average; a norm has buffers in both."""

    def __init__(self) -> None:
        super().__init__()
        self.student = nn.Sequential(nn.BatchNorm1d(WIDTH), nn.Linear(WIDTH, WIDTH), nn.Tanh())
        self.teacher = copy.deepcopy(self.student).requires_grad_(False)
        self.head = nn.Linear(WIDTH, 1)

    def predict(self, x: torch.Tensor) -> torch.Tensor:
        student = self.student(x)
        with torch.no_grad():
            teacher = self.teacher.eval()(x)
        return self.head(student) + (student - teacher).square().sum(dim=1, keepdim=True)

    def average(self) -> None:
        """What `Training.update_average` is to do."""
        with torch.no_grad():
            for mine, its in zip(self.teacher.parameters(), self.student.parameters(), strict=True):
                mine.copy_(DECAY * mine + (1 - DECAY) * its)
            for copied, buffer in zip(self.teacher.buffers(), self.student.buffers(), strict=True):
                copied.copy_(buffer)


MODELS: dict[str, Callable[[], Awkward]] = {
    "batch norm": BatchNorm,
    "buffers": Buffers,
    "tied": Tied,
    "dropout": Dropout,
    "doubles": Doubles,
    "frozen": Frozen,
    "unused": Unused,
    "used twice": UsedTwice,
    "scalars": Scalars,
    "parametrized": Parametrized,
    "pruned": Pruned,
    "checkpointed": Checkpointed,
    "averaged": Averaged,
}


def make_model(name: str) -> Awkward:
    """The same each time."""
    torch.manual_seed(3)
    return MODELS[name]()


def make_optimizer(model: nn.Module) -> torch.optim.Optimizer:
    """With a state of each parameter, and without the noise of Adam where gradients are next to nothing."""
    return torch.optim.AdamW(model.parameters(), lr=3e-2, eps=1e-3)


def samples(num_worlds: int) -> list[Sample]:
    """Those of a run in so many worlds, one after the other."""
    rows = torch.randn(GLOBAL_BATCH * STEPS_A_WORLD * num_worlds, WIDTH, generator=torch.Generator().manual_seed(1))
    return [{"x": row, "labels": row.sum()} for row in rows]


def train_plainly(name: str, worlds: Sequence[int]) -> dict[str, torch.Tensor]:
    """The state of a model after a run in worlds of several sizes, computed in one process with torch alone.

    Each rank has buffers of its own during a step, which begins with those of rank 0.
    """
    model, data = make_model(name), samples(len(worlds))
    optimizer = make_optimizer(model)
    for step in range(STEPS_A_WORLD * len(worlds)):
        world_size = worlds[step // STEPS_A_WORLD]
        share = GLOBAL_BATCH // world_size
        before = _buffers(model)
        of_rank_0 = before
        for rank in range(world_size):
            _set_buffers(model, before)
            begin = step * GLOBAL_BATCH + rank * share
            for first in range(begin, begin + share, MICRO_BATCH):
                rows = data[first : first + MICRO_BATCH]
                batch = {key: torch.stack([row[key] for row in rows]) for key in ("x", "labels")}
                torch.autograd.backward(model(**batch)["loss"] * MICRO_BATCH / GLOBAL_BATCH)
            of_rank_0 = _buffers(model) if rank == 0 else of_rank_0
        _set_buffers(model, of_rank_0)
        nn.utils.clip_grad_norm_(model.parameters(), CLIP)
        optimizer.step()
        optimizer.zero_grad()
        if isinstance(model, Averaged):
            model.average()
    return {key: value.detach().clone() for key, value in model.state_dict().items()}


def _buffers(model: nn.Module) -> dict[str, torch.Tensor]:
    return {name: buffer.clone() for name, buffer in model.named_buffers()}


def _set_buffers(model: nn.Module, values: dict[str, torch.Tensor]) -> None:
    for name, buffer in model.named_buffers():
        buffer.copy_(values[name])
