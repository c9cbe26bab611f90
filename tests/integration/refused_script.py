"""What test_refused_scripts.py runs as ranks.

Under every strategy, a session is handed one thing after another that it can't train, and at last a good one and a
second. RANK_SETTINGS comes from the test. Each rank writes the messages that it got, as JSON.
"""

import json
import os
import traceback
import warnings
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

RANK_SETTINGS: dict[str, Any] = globals()["RANK_SETTINGS"]
os.environ.update(RANK_SETTINGS["environment"])

import torch  # noqa: E402
from torch import nn  # noqa: E402
from torch.distributed.device_mesh import init_device_mesh  # noqa: E402
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard  # noqa: E402
from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module  # noqa: E402
from torch.nn.parallel import DistributedDataParallel  # noqa: E402
from torch.optim.lr_scheduler import ReduceLROnPlateau  # noqa: E402
from torch.utils.data import DataLoader, IterableDataset  # noqa: E402

import spottrain  # noqa: E402
from spottrain.world.failures import UserError  # noqa: E402
from spottrain_api.settings.choices import Strategy  # noqa: E402

torch.set_num_threads(1)
warnings.filterwarnings("ignore")
WORLD = int(os.environ["WORLD_SIZE"])
SAMPLES = [torch.ones(2)] * 8


class Stream(IterableDataset[torch.Tensor]):
    def __iter__(self) -> Iterator[torch.Tensor]:
        yield from SAMPLES


def plain() -> nn.Module:
    return nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))


def adamw(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters())


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters())


def with_loss(model: nn.Module) -> torch.optim.Optimizer:
    """As for a loss with weights of its own."""
    return torch.optim.AdamW([*model.parameters(), *nn.Linear(2, 2).parameters()])


def on_meta() -> nn.Module:
    with torch.device("meta"):
        return plain()


def under_zero_init() -> nn.Module:
    import deepspeed

    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False  # its compilation on a CPU takes minutes
    with deepspeed.zero.Init(config_dict_or_path={"train_batch_size": WORLD, "zero_optimization": {"stage": 3}}):
        return plain()


def tensor_parallel() -> nn.Module:
    return parallelize_module(plain(), init_device_mesh("cpu", (WORLD,)), {"0": ColwiseParallel()})


def tensor_and_data_parallel() -> nn.Module:
    mesh = init_device_mesh("cpu", (1, WORLD), mesh_dim_names=("data", "tensor"))
    model = parallelize_module(plain(), mesh["tensor"], {"0": ColwiseParallel()})
    fully_shard(model, mesh=mesh["data"])
    return model


def frozen() -> nn.Module:
    return plain().requires_grad_(False)


def sparse() -> nn.Module:
    return nn.Sequential(nn.Embedding(4, 2, sparse=True))


Given = dict[str, Any]
PREPARED: dict[str, Callable[[], Given]] = {
    "iterable": lambda: {"dataset": Stream()},
    "data loader": lambda: {"dataset": DataLoader(SAMPLES)},  # type: ignore[arg-type]
    "splits": lambda: {"dataset": {"train": SAMPLES}},
    "empty": lambda: {"dataset": []},
    "sampler": lambda: {"loader": {"batch_sampler": [[0]]}},
    "collate": lambda: {"collate": [torch.stack]},
    "no workers": lambda: {"num_workers": 0, "loader": {"prefetch_factor": 2}},
    "meta": lambda: {"model": on_meta()},
    "zero init": lambda: {"model": under_zero_init()},
    "tensor parallel": lambda: {"model": tensor_parallel()},
    "wrapped": lambda: {"model": DistributedDataParallel(plain())},
    "frozen": lambda: {"model": frozen()},
    "sparse": lambda: {"model": sparse(), "optimizer": sgd},
    "sparse bag": lambda: {"model": nn.Sequential(nn.EmbeddingBag(4, 2, sparse=True)), "optimizer": sgd},
    "closure": lambda: {"optimizer": lambda model: torch.optim.LBFGS(model.parameters())},
    "loss": lambda: {"optimizer": with_loss},
    "optimizer made": lambda: {"optimizer": adamw(plain())},
    "optimizers": lambda: {"optimizer": lambda model: [adamw(model)]},
    "plateau": lambda: {"scheduler": ReduceLROnPlateau},
    "schedulers": lambda: {"scheduler": lambda optimizer: [optimizer]},
    "scheduler made": lambda: {"scheduler": torch.optim.lr_scheduler.StepLR(adamw(plain()), 1)},
}
ADOPTED: dict[str, Callable[[], Given]] = {
    **{name: PREPARED[name] for name in ("iterable", "data loader", "splits", "empty")},
    "meta": lambda: {"model": on_meta(), "spread": fully_shard},
    "tensor parallel": lambda: {"model": tensor_parallel(), "spread": None},
    "tensor and data parallel": lambda: {"model": tensor_and_data_parallel(), "spread": None},
    "version 1": lambda: {"spread": partial(FullyShardedDataParallel, device_id=torch.device("cpu"))},
    "not spread": lambda: {"spread": None},
    "sparse": lambda: {"model": sparse(), "optimizer": sgd},
    "closure": lambda: {"optimizer": lambda model: torch.optim.LBFGS(model.parameters())},
    "loss": lambda: {"optimizer": with_loss},
    "plateau": lambda: {"scheduler": ReduceLROnPlateau},
}


def prepare(session: spottrain.Session, given: Given) -> Any:
    usual: Given = {"model": plain(), "optimizer": adamw, "dataset": SAMPLES}
    return session.prepare(**(usual | given))


def adopt(session: spottrain.Session, given: Given) -> Any:
    """As a framework does it, by DDP unless the case says otherwise."""
    model = given.pop("model", None) or plain()
    spread = given.pop("spread", DistributedDataParallel)
    model = spread(model) if spread is not None else model
    optimizer = given.pop("optimizer", adamw)(model)
    scheduler = given.pop("scheduler", None)
    if scheduler is not None:
        given["scheduler"] = scheduler(optimizer)
    given.setdefault("dataset", SAMPLES)
    return session.adopt(model, optimizer, **given)


def refusal(
    train: Callable[[spottrain.Session, Given], Any], session: spottrain.Session, given: Callable[[], Given] = dict
) -> str:
    try:
        train(session, given())
    except UserError as error:
        return str(error)
    except Exception:
        return traceback.format_exc()
    return "accepted"


def use(session: spottrain.Session, strategy: str) -> None:
    name, _, stage = strategy.partition(" ")
    deepspeed = session.config.deepspeed.model_copy(update={"zero_stage": int(stage) if stage else None})
    session.config = session.config.model_copy(update={"strategy": Strategy(name), "deepspeed": deepspeed})


found: dict[str, str] = {}
trainings: list[spottrain.Training] = []
with spottrain.session(global_batch=4, micro_batch=2) as session:
    for strategy in RANK_SETTINGS["strategies"]:
        use(session, strategy)
        for name, given in PREPARED.items():
            found[f"{name}, {strategy}"] = refusal(prepare, session, given)
    use(session, "auto")
    for name, given in ADOPTED.items():
        found[f"{name}, adopted"] = refusal(adopt, session, given)
    of_rank: Given = {"dataset": SAMPLES[session.rank :]}
    found["after all"] = refusal(
        lambda session, given: trainings.append(prepare(session, given)), session, lambda: of_rank
    )
    found["other totals"] = refusal(lambda session, _: next(trainings[0].steps(4 + session.rank)), session)
    found["other lengths"] = refusal(lambda session, _: next(trainings[0].steps(4)), session)
    found["a second"] = refusal(prepare, session)
    found["a second, adopted"] = refusal(adopt, session)
Path(f"{RANK_SETTINGS['result']}-{session.rank}").write_text(json.dumps(found))
