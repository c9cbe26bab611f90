"""Whether a session can train what a script hands to it. Each check raises UserError, the same on all ranks, and
before the model is spread if that is possible."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule, FullyShardedDataParallel
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler, ReduceLROnPlateau
from torch.utils.data import DataLoader, IterableDataset

from spottrain.checkpoint import UnsupportedState
from spottrain.checkpoint.format import codec
from spottrain.data.loader import OPTIONS, Data
from spottrain.recovery.training_state import Stateful
from spottrain.world.failures import UserError, as_user_errors
from spottrain_api.contract import FailureReason

_WRAPPERS = (DistributedDataParallel, nn.DataParallel, FullyShardedDataParallel, FSDPModule)
# Arguments of DataLoader for which there is another place, or none.
_DECIDED = {
    "dataset": "pass it as dataset",
    "collate_fn": "pass it as collate",
    "num_workers": "pass it as num_workers",
    "shuffle": "pass it as shuffle",
    **dict.fromkeys(("batch_size", "batch_sampler"), "the batch is the job's (batch.global, batch.micro)"),
    **dict.fromkeys(("sampler", "generator"), "the order of the samples follows from the job's seed and shuffle"),
    "in_order": "the order of the samples follows from the job's seed and shuffle",
    "drop_last": "the batches run on from one epoch into the next, so that none is cut short",
    "persistent_workers": "the run is one pass of the workers, who stay until its end",
}


def check_dataset(dataset: Any) -> None:
    """Samples are chosen by number, at any step of any world size."""
    kind = type(dataset).__name__
    if isinstance(dataset, DataLoader):
        raise _refused(
            "dataset is a DataLoader, and batches are made here, for each world size; pass its data set "
            "(loader.dataset), and its collate_fn and num_workers as collate and num_workers"
        )
    if isinstance(dataset, Mapping):
        raise _refused(
            f"dataset is a mapping ({kind}), and samples are chosen by number; pass one of its values, such as the "
            'split "train", or a list of the samples'
        )
    if isinstance(dataset, IterableDataset) or not (hasattr(dataset, "__len__") and hasattr(dataset, "__getitem__")):
        raise _refused(
            f"dataset ({kind}) can't be read by index: it needs __len__ and __getitem__, as every step of a resumed "
            "or resized run takes its samples by number; use a map-style data set (of Hugging Face: "
            "load_dataset without streaming), or write the stream to files that have an index"
        )


def check_data(data: Data) -> None:
    """A data set, and how a script wants it read."""
    check_dataset(data.dataset)
    if data.collate is not None and not callable(data.collate):
        raise _refused(f"collate ({type(data.collate).__name__}) is not a function of a list of items")
    for name in data.loader:
        if name not in OPTIONS:
            why = _DECIDED.get(name, "it is no argument that spottrain knows")
            raise _refused(f"loader: {name} can't be given: {why}. Use one of {', '.join(sorted(OPTIONS))}")
    with as_user_errors():
        data.check()


def check_model(model: nn.Module) -> None:
    """A model that no engine has spread yet."""
    if isinstance(model, _WRAPPERS):
        raise _refused(
            f"the model is wrapped already ({type(model).__name__}); session.prepare spreads it as the job's "
            "strategy says, so hand it the plain model"
        )
    for name, parameter in model.named_parameters():
        if isinstance(parameter, DTensor):
            raise _refused(
                f"the parameter {name} is a DTensor: the model is spread over ranks already, as parallelize_module "
                "and fully_shard do. Tensor parallelism isn't supported yet; hand session.prepare the plain model"
            )
    _check_modules(model)
    if not any(parameter.requires_grad for parameter in model.parameters()):
        raise _refused("the model has no parameter that is trained; set requires_grad of some of them")


def check_adopted_model(model: nn.Module, world_size: int) -> None:
    """A model that a framework has spread: every rank computes other samples, so that gradients have to be averaged
    over all of them."""
    if any(isinstance(module, FullyShardedDataParallel) for module in model.modules()):
        raise _refused("the framework has spread the model by FSDP version 1; set fsdp_version 2 in its settings")
    is_sharded = any(isinstance(module, FSDPModule) for module in model.modules())
    for name, parameter in model.named_parameters():
        if isinstance(parameter, DTensor) and not (is_sharded and _is_shard_of_all(parameter, world_size)):
            raise _refused(
                f"the parameter {name} is spread over another dimension than data (placements "
                f"{parameter.placements} over {parameter.device_mesh.size()} of {world_size} ranks). Tensor and "
                "pipeline parallelism aren't supported yet; let the framework use DDP or FSDP2 alone"
            )
    _check_modules(model)


def checked_optimizer(make: Callable[[nn.Module], Optimizer]) -> Callable[[nn.Module], Optimizer]:
    """The same function, whose result is checked."""
    if isinstance(make, Optimizer) or not callable(make):
        raise _refused(
            f"optimizer ({type(make).__name__}) is not a function; pass one that makes it of the spread model, such "
            "as optimizer=lambda model: torch.optim.AdamW(model.parameters(), lr=3e-4)"
        )

    def make_and_check(model: nn.Module) -> Optimizer:
        made = make(model)
        check_optimizer(made)
        return made

    return make_and_check


def check_optimizer(optimizer: Any) -> None:
    """Steps are made of gradients alone."""
    kind = type(optimizer).__name__
    if not isinstance(optimizer, Optimizer):
        raise _refused(f"optimizer makes a {kind}; let it return one torch.optim.Optimizer, for all parameters")
    if _needs_more(optimizer):
        raise _refused(
            f"the optimizer {kind} computes the loss again in its step (it needs a closure), and a step here is one "
            "backward of each micro-batch; use one that steps by gradients, such as AdamW"
        )


def checked_scheduler(make: Callable[[Optimizer], LRScheduler], optimizer: Optimizer) -> LRScheduler:
    """The schedule that `make` makes."""
    if isinstance(make, LRScheduler) or not callable(make):
        raise _refused(
            f"scheduler ({type(make).__name__}) is not a function; pass one that makes it of the optimizer, such as "
            "scheduler=lambda optimizer: torch.optim.lr_scheduler.StepLR(optimizer, step_size=1000)"
        )
    made = make(optimizer)
    check_scheduler(made)
    return made


def check_scheduler(scheduler: Any) -> None:
    """Learning rates follow from the step alone."""
    kind = type(scheduler).__name__
    if isinstance(scheduler, ReduceLROnPlateau) or (hasattr(scheduler, "step") and _needs_more(scheduler)):
        raise _refused(
            f"the schedule {kind} follows a metric, and a drain may put off the evaluation that gives it; use a "
            "schedule of steps, such as those of torch.optim.lr_scheduler or spottrain.schedules"
        )
    if not isinstance(scheduler, LRScheduler):
        raise _refused(f"scheduler makes a {kind}; let it return one torch.optim.lr_scheduler.LRScheduler")


def check_stateful(stateful: Mapping[str, Stateful]) -> None:
    """Parts of a framework whose state the first commit would stumble over."""
    for name, part in stateful.items():
        try:
            codec.encode({name: part.state_dict()})
        except UnsupportedState as error:
            raise _refused(str(error)) from error


def _check_modules(model: nn.Module) -> None:
    for name, tensor in _tensors(model):
        if hasattr(tensor, "ds_id"):
            raise _refused(
                f"the parameter {name} was made under deepspeed.zero.Init, which has partitioned it already; build "
                "the model without it: the strategy deepspeed partitions it at stage 3"
            )
        if tensor.is_meta:
            raise _refused(
                f"{name} is on the meta device, where it has no values; build the model on the CPU, or call "
                "model.to_empty(device='cpu') and initialise it, before session.prepare"
            )
    for name, module in model.named_modules():
        if isinstance(module, nn.Embedding | nn.EmbeddingBag) and module.sparse:
            raise _refused(
                f"the module {name} is an {type(module).__name__} with sparse=True, whose gradients can't be "
                "averaged over ranks, clipped or resumed here; make it with sparse=False"
            )


def _tensors(model: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    yield from model.named_parameters()
    yield from model.named_buffers()


def _is_shard_of_all(parameter: DTensor, world_size: int) -> bool:
    """As FSDP2 has it: all ranks have a share, in one row or in a row for each of several replicas."""
    num_sharded = sum(not placement.is_replicate() for placement in parameter.placements)
    return parameter.device_mesh.size() == world_size and num_sharded <= 1


def _needs_more(part: Any) -> bool:
    """Whether an optimizer's or a schedule's step can't be called without an argument. It is asked of the class, as
    schedules put a function of theirs in the place of an optimizer's step."""
    try:
        inspect.signature(type(part).step).bind(part)
    except TypeError:
        return True
    except ValueError:  # of compiled code, that has no signature
        return False
    return False


def _refused(message: str) -> UserError:
    return UserError(FailureReason.INVALID_CONFIGURATION, message)
