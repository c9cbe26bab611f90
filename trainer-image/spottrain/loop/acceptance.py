"""Checks whether a session can train what a script passes to it.

Each check raises UserError, the same on all ranks, and before the model is spread if possible.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import suppress
from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule, FullyShardedDataParallel
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Adafactor, Optimizer
from torch.optim.lr_scheduler import LRScheduler, ReduceLROnPlateau
from torch.utils.data import DataLoader, IterableDataset

from spottrain.checkpoint.errors import UnsupportedState
from spottrain.checkpoint.format import codec
from spottrain.data.loader import OPTIONS, Data
from spottrain.data.mixtures.dataset import Mixture
from spottrain.data.order import DataOrder, Permutation
from spottrain.data.script_order import OrderFunction, ScriptOrder
from spottrain.data.shards.dataset import Shards
from spottrain.data.streams.dataset import Streams
from spottrain.engines.optimizer_state import state_dict_of
from spottrain.recovery.by_rank import is_loader
from spottrain.recovery.saved_schedule import schedule_state
from spottrain.recovery.script_parts import Stateful, states_of
from spottrain.recovery.training_state import ORDER, STABILITY
from spottrain.world.failures import UserError, as_user_errors

_WRAPPERS = (DistributedDataParallel, nn.DataParallel, FullyShardedDataParallel, FSDPModule)
# Arguments of DataLoader that are given elsewhere, or not at all, and why.
_DECIDED = {
    "dataset": "pass it as dataset",
    "collate_fn": "pass it as collate",
    "num_workers": "pass it as num_workers",
    "shuffle": "pass it as shuffle",
    "batch_size": "the batch is the job's (batch.global, batch.micro)",
    **dict.fromkeys(("sampler", "batch_sampler"), "pass what it returns as order, a function of the epoch"),
    "generator": "the order of the samples follows from the job's seed and shuffle",
    "in_order": "the order of the samples follows from the job's seed and shuffle",
    "drop_last": "training.steps runs on from one epoch into the next, and the last batch of training.epochs counts",
    "persistent_workers": "the workers stay until the end of the run, which is one pass for them",
}


def check_dataset(dataset: Any) -> None:
    """Refuse data sets that can be read neither by index nor as streams."""
    if isinstance(dataset, Streams):
        return
    kind = type(dataset).__name__
    if isinstance(dataset, DataLoader):
        raise UserError(
            "dataset is a DataLoader, and batches are made here, for each world size; pass its data set "
            "(loader.dataset), and its collate_fn and num_workers as collate and num_workers"
        )
    if isinstance(dataset, Mapping):
        raise UserError(
            f"dataset is a mapping ({kind}), and samples are chosen by number; pass one of its values, such as the "
            'split "train", or a list of the samples'
        )
    if isinstance(dataset, IterableDataset) or not (hasattr(dataset, "__len__") and hasattr(dataset, "__getitem__")):
        raise UserError(
            f"dataset ({kind}) can't be read by index: it needs __len__ and __getitem__, as every step of a resumed "
            "or resized run takes its samples by number; use a map-style data set (of Hugging Face: "
            "load_dataset without streaming), or pass the data as a fixed number of streams, "
            "spottrain.data.Streams(make_stream, streams=...)"
        )


def check_data(data: Data) -> None:
    """Refuse data, and options for reading it, that a session cannot follow."""
    check_dataset(data.dataset)
    if data.collate is not None and not callable(data.collate):
        raise UserError(f"collate ({type(data.collate).__name__}) is not a function of a list of items")
    for name in data.loader:
        if name not in OPTIONS:
            why = _DECIDED.get(name, "spottrain does not know this argument")
            raise UserError(f"loader: {name} can't be given: {why}. Use one of {', '.join(sorted(OPTIONS))}")
    with as_user_errors():
        data.check()


def order_of(data: Data, seed: int, *, order: OrderFunction | None, largest_batch: int) -> DataOrder:
    """The order of the samples.

    Args:
        data: The data set, and how it is read.
        seed: Seed of the order.
        order: The script's own, if it has one.
        largest_batch: Largest number of samples of a batch.

    Raises:
        UserError: The data have no order, or cannot be read that way.
    """
    check_data(data)
    dataset = data.dataset
    with as_user_errors():
        if isinstance(dataset, Streams | Mixture):
            if order is not None:
                raise ValueError(
                    f"order and a data set of {type(dataset).__name__} were given, and each says how samples are "
                    "ordered; leave out order, or pass another data set"
                )
            return dataset.order(seed=seed, shuffle=data.shuffle, global_batch=largest_batch)
        length = len(dataset)
        if order is None or length == 0:
            if isinstance(dataset, Shards):
                return dataset.order(seed=seed, shuffle=data.shuffle, global_batch=largest_batch)
            return Permutation(num_samples=length, seed=seed, shuffle=data.shuffle)
        if not data.shuffle:
            raise ValueError("order and shuffle=False were given, and each says how samples are ordered; pass one")
        return ScriptOrder(order, num_samples=length, seed=seed, largest_batch=largest_batch, checking=as_user_errors)


def check_model(model: Any, *, may_be_frozen: bool = False) -> None:
    """Refuse a model that is spread already, or that no engine can spread."""
    if not isinstance(model, nn.Module):
        raise UserError(
            f"the model is a {type(model).__name__}, and a session trains one torch.nn.Module; put several models "
            "into one module, as attributes or in an nn.ModuleDict, and compute the loss in its forward"
        )
    if isinstance(model, _WRAPPERS):
        raise UserError(
            f"the model is wrapped already ({type(model).__name__}); session.prepare spreads it by the job's "
            "strategy, so pass the plain model"
        )
    for name, parameter in model.named_parameters():
        if isinstance(parameter, DTensor):
            raise UserError(
                f"the parameter {name} is a DTensor: the model is spread over ranks already. If fully_shard did it, "
                "leave it out: the strategy fsdp of the job shards the model. If parallelize_module did it: tensor "
                "parallelism is not supported, as every rank computes samples of its own; leave it out, too, and a "
                "model that is too large for one accelerator trains with the strategy fsdp, or deepspeed with "
                "zeroStage 3"
            )
    _check_modules(model)
    if not may_be_frozen and not any(parameter.requires_grad for parameter in model.parameters()):
        raise UserError("the model has no parameter that is trained; set requires_grad on some of them")


def checked_total(total: Any, what: str = "total of steps") -> int:
    """The steps or epochs of a run, which scripts also compute as floats and tensors.

    Raises UserError for a total that is not a whole number.
    """
    with suppress(TypeError, ValueError, OverflowError, RuntimeError):  # torch raises the last, for several numbers
        if (number := int(total)) == total:
            return number
    raise UserError(
        f"the {what} is {total!r}, and a run ends after a whole number of them; pass a whole number. Epochs with "
        "exact ends are those of training.epochs"
    )


def check_given(total: Any, epochs: Any) -> None:
    """Refuse a run without a length."""
    if total is None and epochs is None:
        raise UserError(
            "a run needs a length, and was given none: pass total, the steps of the whole run, or epochs, or both, "
            "and it ends with what comes first"
        )


def check_length(total: Any, epochs: Any, steps_per_epoch: Any, *, has_data: bool) -> None:
    """Refuse a run of `Session.attach` without a length, or whose epochs have no ends."""
    check_given(total, epochs)
    if epochs is not None and has_data == (steps_per_epoch is not None):
        raise UserError(
            "epochs of a data set have the steps that its samples fill; leave out steps_per_epoch"
            if has_data
            else "epochs need an end: pass the dataset that they go through, or steps_per_epoch, if the script reads "
            "its data itself"
        )
    if epochs is None and steps_per_epoch is not None:
        raise UserError("steps_per_epoch goes with epochs=..., and session.attach was given total; leave out one")
    if steps_per_epoch is not None and checked_total(steps_per_epoch, "number of steps_per_epoch") < 1:
        raise UserError(f"steps_per_epoch is {steps_per_epoch}, and an epoch has at least one step")


def check_adopted_model(model: nn.Module, world_size: int) -> None:
    """Refuse a model that a framework has spread by more than data parallelism.

    Every rank computes different samples, so gradients are averaged over all ranks.
    """
    if any(isinstance(module, FullyShardedDataParallel) for module in model.modules()):
        raise UserError("the framework has spread the model by FSDP version 1; set fsdp_version 2 in its settings")
    is_sharded = any(isinstance(module, FSDPModule) for module in model.modules())
    for name, parameter in model.named_parameters():
        if isinstance(parameter, DTensor) and not (is_sharded and _is_shard_of_all(parameter, world_size)):
            raise UserError(
                f"the parameter {name} is spread over another dimension than data (placements "
                f"{parameter.placements} over {parameter.device_mesh.size()} of {world_size} ranks). Tensor and "
                "pipeline parallelism are not supported yet; let the framework use DDP or FSDP2 alone"
            )
    _check_modules(model)


def checked_optimizer(make: Callable[[nn.Module], Optimizer]) -> Callable[[nn.Module], Optimizer]:
    """Wrap the function that makes the optimizer, so that its result is checked."""
    if isinstance(make, Optimizer) or not callable(make):
        raise UserError(
            f"optimizer ({type(make).__name__}) is not a function; pass one that makes it from the spread model, as "
            "in optimizer=lambda model: torch.optim.AdamW(model.parameters(), lr=3e-4)"
        )

    def make_and_check(model: nn.Module) -> Optimizer:
        made = make(model)
        check_optimizer(made, model)
        return made

    return make_and_check


def check_optimizer(optimizer: Any, model: nn.Module) -> None:
    """Refuse an optimizer that needs more than gradients in its step.

    And one with parameters that `model`, as it is spread, does not have.
    """
    kind = type(optimizer).__name__
    if not isinstance(optimizer, Optimizer):
        raise UserError(f"optimizer makes a {kind}; let it return one torch.optim.Optimizer, for all parameters")
    if _needs_more(optimizer):
        raise UserError(
            f"the optimizer {kind} computes the loss again in its step (it needs a closure), and a step here is one "
            "backward pass per micro-batch; use one that needs gradients alone, such as AdamW"
        )
    try:
        state_dict_of(optimizer)
    except UnsupportedState as error:
        raise UserError(str(error)) from error
    if isinstance(optimizer, Adafactor) and any(isinstance(each, DTensor) for each in model.parameters()):
        raise UserError(
            "torch's Adafactor can't step sharded parameters: it changes sums over the shards in place, which torch "
            "refuses. Use the strategy ddp, or the Adafactor of transformers"
        )
    own = set(model.parameters())
    foreign = sum(parameter not in own for group in optimizer.param_groups for parameter in group["params"])
    if foreign:
        raise UserError(
            f"{foreign} of the optimizer's parameters are not the model's: their gradients would not be averaged "
            "over the ranks, and no commit would hold them. Make the optimizer from the parameters of the spread "
            "model. If a loss has parameters, put its module into the model, and compute it in the model's forward"
        )


def checked_scheduler(make: Callable[[Optimizer], LRScheduler], optimizer: Optimizer) -> LRScheduler:
    """Make the schedule, and check it."""
    if isinstance(make, LRScheduler) or not callable(make):
        raise UserError(
            f"scheduler ({type(make).__name__}) is not a function; pass one that makes it from the optimizer, as in "
            "scheduler=lambda optimizer: torch.optim.lr_scheduler.StepLR(optimizer, step_size=1000)"
        )
    made = make(optimizer)
    check_scheduler(made)
    return made


def check_scheduler(scheduler: Any) -> None:
    """Refuse a schedule whose rates depend on more than the step, or whose state no commit can hold."""
    kind = type(scheduler).__name__
    if _is_of_epochs(scheduler):
        raise UserError(
            f"the schedule {kind} needs the epoch in each step, as those of timm do, and a session steps it after "
            "each update without one; use a schedule of steps, such as those of torch.optim.lr_scheduler or "
            "spottrain.schedules"
        )
    if isinstance(scheduler, ReduceLROnPlateau) or (hasattr(scheduler, "step") and _needs_more(scheduler)):
        raise UserError(
            f"the schedule {kind} follows a metric, and a drain may postpone the evaluation that computes it; use a "
            "schedule of steps, such as those of torch.optim.lr_scheduler or spottrain.schedules"
        )
    if not isinstance(scheduler, LRScheduler):
        raise UserError(f"scheduler makes a {kind}; let it return one torch.optim.lr_scheduler.LRScheduler")
    _check_state({"scheduler": schedule_state(scheduler)})


def check_scheduler_interval(interval: Any) -> None:
    """Refuse another interval than those that a schedule can have."""
    if interval not in ("step", "epoch"):
        raise UserError(f'scheduler_interval is {interval!r}; pass "step" or "epoch", after which the schedule steps')


def check_stateful(stateful: Mapping[str, Stateful], records: Mapping[str, Stateful] | None = None) -> None:
    """Refuse parts of a script, and records of a framework, whose state no commit can hold."""
    for name, part in stateful.items():
        if is_loader(part):
            raise UserError(
                f"{name} ({type(part).__name__}) reads data for its rank alone, and stateful has what is the same on "
                "all ranks; pass the data as dataset, with items by index or as spottrain.data.Streams. In a loop of "
                "your own, session.attach takes the loader"
            )
    check_states(stateful, records)


def check_states(stateful: Mapping[str, Stateful], records: Mapping[str, Stateful] | None = None) -> None:
    """Refuse parts whose state no commit can hold, and names that the library uses itself."""
    check_names(stateful)
    for name, part in {**stateful, **(records or {})}.items():
        if not (hasattr(part, "state_dict") and hasattr(part, "load_state_dict")):
            raise UserError(
                f"{name} ({type(part).__name__}) has no state_dict and load_state_dict, which save and restore it; "
                "write a small class with both around the values"
            )
        _check_state({name: part.state_dict()} if name in (records or {}) else states_of({name: part}))


def check_names(names: Collection[str]) -> None:
    """Refuse names of a script's state that the library uses itself."""
    for name, owner in ((STABILITY, "the job's stability"), (ORDER, "the order of the samples")):
        if name in names:
            raise UserError(f"the name {name} is taken by {owner}; choose another one")


def _check_state(state: dict[str, Any]) -> None:
    try:
        codec.split(state)
    except UnsupportedState as error:
        raise UserError(str(error)) from error


def _check_modules(model: nn.Module) -> None:
    for name, tensor in _tensors(model):
        if hasattr(tensor, "ds_id"):
            raise UserError(
                f"the parameter {name} was made under deepspeed.zero.Init, which has partitioned it already; build "
                "the model without it: the strategy deepspeed partitions it at stage 3"
            )
        if tensor.is_meta:
            raise UserError(
                f"{name} is on the meta device and has no values; build the model on the CPU, or call "
                "model.to_empty(device='cpu') and initialise it, before session.prepare"
            )
    for name, module in model.named_modules():
        if isinstance(module, nn.Embedding | nn.EmbeddingBag) and module.sparse:
            raise UserError(
                f"the module {name} is an {type(module).__name__} with sparse=True, whose gradients can't be "
                "averaged over ranks, clipped or resumed here; make it with sparse=False"
            )


def _tensors(model: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    yield from model.named_parameters()
    yield from model.named_buffers()


def _is_shard_of_all(parameter: DTensor, world_size: int) -> bool:
    """Whether all ranks have a share, as under FSDP2. The ranks form one row, or one row per replica."""
    num_sharded = sum(not placement.is_replicate() for placement in parameter.placements)
    return parameter.device_mesh.size() == world_size and num_sharded <= 1


def _is_of_epochs(scheduler: Any) -> bool:
    """Whether the step of a schedule cannot be called without an epoch."""
    if not hasattr(scheduler, "step") or not _needs_more(scheduler):
        return False
    parameters = list(inspect.signature(type(scheduler).step).parameters)
    return parameters[1:2] == ["epoch"]


def _needs_more(part: Any) -> bool:
    """Whether a step method cannot be called without an argument.

    The step is that of an optimizer or a schedule. Inspects the class, because schedules replace the step of an
    optimizer by a function of their own.
    """
    try:
        inspect.signature(type(part).step).bind(part)
    except TypeError:
        return True
    except ValueError:  # compiled code has no signature
        return False
    return False
