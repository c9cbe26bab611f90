"""What test_engine_ranks.py runs as ranks.

Every case trains twice with an engine, once with a break in between. RANK_SETTINGS comes from the test. Rank 0 writes
the results of each case as JSON.
"""

import json
import os
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, cast

RANK_SETTINGS: dict[str, Any] = globals()["RANK_SETTINGS"]
os.environ.update(RANK_SETTINGS["environment"])

import torch  # noqa: E402
import torch.distributed as dist  # noqa: E402
from safetensors.torch import load_file  # noqa: E402
from torch import nn  # noqa: E402
from torch.distributed.tensor import DTensor  # noqa: E402
from torch.nn import functional  # noqa: E402

from no_pickles import refuse_pickles  # noqa: E402
from spottrain.checkpoint.checkpointer import Checkpointer  # noqa: E402
from spottrain.checkpoint.format.commits import Commit  # noqa: E402
from spottrain.checkpoint.loading.export import export  # noqa: E402
from spottrain.checkpoint.stores.storage import CheckpointStorage  # noqa: E402
from spottrain.checkpoint.stores.uri import open_storage  # noqa: E402
from spottrain.data.batch import BatchPlan  # noqa: E402
from spottrain.engines.blocks import find_blocks, prepare_blocks  # noqa: E402
from spottrain.engines.choice import choose_engine  # noqa: E402
from spottrain.engines.engine import EngineConfig  # noqa: E402
from spottrain_api.settings.training import FsdpConfig  # noqa: E402

torch.set_num_threads(1)
refuse_pickles()
RANK, WORLD, LOCAL = (int(os.environ[name]) for name in ("RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE"))
BATCH, WIDTH, CONTEXT, VOCABULARY, STEPS = 2, 16, 6, 20, 4


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.attention = nn.MultiheadAttention(WIDTH, 2, batch_first=True)
        self.mlp = nn.Sequential(nn.Linear(WIDTH, 2 * WIDTH), nn.GELU(), nn.Linear(2 * WIDTH, WIDTH))
        self.dropout = nn.Dropout(0.1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.norm(x)
        return x + self.dropout(self.mlp(self.attention(h, h, h, need_weights=False)[0]))


class TiedGpt(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.tokens = nn.Embedding(VOCABULARY, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(2))
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=False)
        self.head.weight = self.tokens.weight

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.tokens(ids)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


class Cnn(nn.Module):
    """Stages of residual blocks with batch norm, as ResNet's."""

    class Basic(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.conv = nn.Conv2d(4, 4, 3, padding=1)
            self.norm = nn.BatchNorm2d(4)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x + functional.relu(self.norm(self.conv(x)))

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(1, 4, 3)
        self.layer1 = nn.Sequential(self.Basic(), self.Basic())
        self.layer2 = nn.Sequential(self.Basic(), self.Basic())
        self.fc = nn.Linear(4, VOCABULARY)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        image = (ids.unsqueeze(1).unsqueeze(3) == torch.arange(VOCABULARY)).to(self.stem.weight.dtype)
        return self.fc(self.layer2(self.layer1(self.stem(image))).mean(dim=(2, 3)))


class EncoderDecoder(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.tokens = nn.Embedding(VOCABULARY, WIDTH)
        self.transformer = nn.Transformer(WIDTH, 2, 2, 2, 2 * WIDTH, dropout=0.1, batch_first=True)
        self.head = nn.Linear(WIDTH, VOCABULARY)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.tokens(ids)
        return self.head(self.transformer(x, x.flip(1)))


class Nested(nn.Module):
    """Lists in a list, whose items are called one by one.

    The model has two parameters of its own, and one of them is a scalar.
    """

    def __init__(self) -> None:
        super().__init__()
        self.tokens = nn.Embedding(VOCABULARY, WIDTH)
        self.levels = nn.ModuleList(nn.ModuleList([Block(), nn.Linear(WIDTH, WIDTH)]) for _ in range(2))
        self.scale = nn.Parameter(torch.ones(WIDTH))
        self.temperature = nn.Parameter(torch.tensor(0.9))
        self.head = nn.Linear(WIDTH, VOCABULARY)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.tokens(ids)
        for level in self.levels:
            for layer in cast(nn.ModuleList, level):
                x = layer(x)
        return self.head(x * self.scale) / self.temperature


class Mixture(nn.Module):
    """Experts, of which each sample goes to one.

    So ranks use different ones. One more expert is never used, nor is the last block. A buffer follows the samples.
    """

    mean: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self.tokens = nn.Embedding(VOCABULARY, WIDTH)
        self.blocks = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(3))
        self.experts = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(5))
        self.head = nn.Linear(WIDTH, VOCABULARY)
        self.register_buffer("mean", torch.zeros(WIDTH))

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.tokens(ids)
        self.mean = 0.9 * self.mean + 0.1 * x.detach().mean(dim=(0, 1))
        for block in self.blocks[:-1]:
            x = x + torch.tanh(block(x - self.mean))
        chosen = ids[:, 0] % (len(self.experts) - 1)
        return self.head(torch.stack([self.experts[int(expert)](h) for expert, h in zip(chosen, x, strict=True)]))


class Recurrent(nn.Module):
    """No lists at all."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens = nn.Embedding(VOCABULARY, WIDTH)
        # oneDNN, which runs an LSTM, has none in bf16 for processors without AVX-512.
        self.rnn = nn.GRU(WIDTH, WIDTH, batch_first=True)
        self.out = nn.Linear(WIDTH, VOCABULARY)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return self.out(self.rnn(self.tokens(ids))[0])


class Layers(nn.Module):
    """Little to compile."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(VOCABULARY, VOCABULARY), nn.Tanh(), nn.Linear(VOCABULARY, VOCABULARY))

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return self.layers(functional.one_hot(ids, VOCABULARY).float())


ARCHITECTURES: dict[str, Callable[[], nn.Module]] = {
    **{"gpt": TiedGpt, "cnn": Cnn, "encoder-decoder": EncoderDecoder, "nested": Nested, "rnn": Recurrent},
    **{"layers": Layers, "mixture": Mixture},
}


def samples(step: int) -> Iterator[torch.Tensor]:
    """Two micro-batches of this rank."""
    generator = torch.Generator().manual_seed(1000 * step + RANK)
    for _ in range(2):
        yield torch.randint(0, VOCABULARY, (BATCH, CONTEXT), generator=generator)


class Trained:
    """A model under an engine, with the whole mean loss of each step."""

    def __init__(self, strategy: str, case: dict[str, Any]) -> None:
        torch.manual_seed(0)
        model = ARCHITECTURES[case["model"]]()
        blocks = find_blocks(model)
        self.num_blocks = len(blocks)
        prepare_blocks(model, blocks, compiled=case["compiled"], checkpointed=case["checkpointed"])
        config = EngineConfig(
            device=torch.device("cpu"),
            plan=BatchPlan(global_batch=2 * BATCH * WORLD, micro_batch=BATCH, world_size=WORLD),
            local_world_size=LOCAL,
            precision={"fp32": torch.float32, "bf16": torch.bfloat16}[case["precision"]],
            clip_grad_norm=1.0,
            fsdp=FsdpConfig(**case["fsdp"]),
        )
        self.num_parameters = sum(parameter.numel() for parameter in model.parameters())
        self.names = model.state_dict().keys()
        self.engine = choose_engine(strategy, config)
        self.model, self.optimizer = self.engine.wrap(model, lambda m: torch.optim.AdamW(m.parameters(), lr=1e-2))
        self.losses: list[float] = []

    def train(self, first: int, last: int) -> None:
        for step in range(first, last):
            torch.manual_seed(10 * step + RANK)
            total = torch.zeros(())
            for index, ids in enumerate(samples(step)):
                self.engine.begin_micro_batch(is_last=index == 1)
                logits = self.model(ids)
                assert logits.dtype is torch.float32
                wanted = ids[:, 0] if logits.dim() == 2 else ids.roll(1, dims=1)
                loss = functional.cross_entropy(logits.flatten(0, -2), wanted.flatten())
                self.engine.backward(loss / 2)
                total += loss.detach() / 2
            self.engine.update()
            dist.all_reduce(total)
            self.losses.append(float(total) / WORLD)


def run(case: dict[str, Any]) -> dict[str, Any]:
    plain = Trained(case["beside"], {**case, "compiled": False, "checkpointed": False})
    plain.train(0, STEPS)
    steady = Trained(case["strategy"], case)
    steady.train(0, STEPS)
    begun, resumed = Trained(case["strategy"], case), Trained(case["strategy"], case)
    begun.train(0, STEPS // 2)
    written_bytes, is_exported = hand_over(begun, resumed, f"file://{RANK_SETTINGS['folder']}/{case['name']}")
    resumed.train(STEPS // 2, STEPS)
    wanted, found = tensors(steady), tensors(resumed)
    return {
        "losses": steady.losses,
        "plain": plain.losses,
        "resumed": begun.losses + resumed.losses,
        "is_same": all(torch.equal(local(found[name]), local(value)) for name, value in wanted.items()),
        "share": sum(local(parameter).numel() for parameter in steady.model.parameters()) / steady.num_parameters,
        "num_parameters": steady.num_parameters,
        "num_blocks": steady.num_blocks,
        "written_bytes": written_bytes,
        "is_exported": is_exported,
    }


def hand_over(begun: Trained, resumed: Trained, uri: str) -> tuple[int, bool]:
    """Commit the state of one model and load it into another.

    Returns:
        The bytes that all ranks wrote, and whether an export of the commit is the model.
    """
    storage = open_storage(uri)
    checkpointer = Checkpointer(
        storage, generation=1, attempt_id="a", rank=RANK, world_size=WORLD, process_group=dist.group.WORLD
    )
    checkpointer.latest()
    handle = checkpointer.save(begun.engine.state(), step=STEPS // 2)
    newest = checkpointer.latest()
    assert handle.commit is not None
    assert newest is not None
    resumed.engine.load_state(checkpointer.load(resumed.engine.room, newest).state)
    written = torch.tensor([handle.bytes])
    dist.all_reduce(written)
    return int(written), is_exported(begun, storage, newest)


def is_exported(trained: Trained, storage: CheckpointStorage, commit: Commit) -> bool:
    """Rank 0 compares; the others give it their shards."""
    wanted = {name: whole(value) for name, value in trained.engine.state()["model"].items()}
    if RANK > 0:
        return True
    (path,) = export(storage, commit, Path(RANK_SETTINGS["folder"]) / "model.safetensors")
    found = load_file(path)
    return found.keys() == trained.names and all(torch.equal(found[name], value) for name, value in wanted.items())


def tensors(trained: Trained) -> dict[str, torch.Tensor]:
    """Weights, buffers and optimizer state, by name.

    Names of different kinds don't meet.
    """
    state = trained.engine.state()
    return {name: value for part in state.values() for name, value in part.items() if isinstance(value, torch.Tensor)}


def whole(value: torch.Tensor) -> torch.Tensor:
    return value.full_tensor() if isinstance(value, DTensor) else value


def local(value: torch.Tensor) -> torch.Tensor:
    return value.to_local() if isinstance(value, DTensor) else value


dist.init_process_group("gloo")
results: dict[str, Any] = {}
for case in RANK_SETTINGS["cases"]:
    try:
        results[case["name"]] = run(case)
    except Exception:
        results[case["name"]] = {"error": traceback.format_exc()}
        break  # the other ranks may be in another collective by now
if RANK == 0:
    Path(RANK_SETTINGS["result"]).write_text(json.dumps(results))
dist.barrier()
dist.destroy_process_group()
