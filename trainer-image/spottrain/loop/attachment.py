"""What a script attaches to its session, by kind."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from spottrain import exchange
from spottrain.checkpoint.errors import UnsupportedState
from spottrain.checkpoint.format import codec
from spottrain.engines.inside import inside
from spottrain.engines.optimizer_state import state_dict_of
from spottrain.engines.structure import check_same_model, first_difference
from spottrain.loop.acceptance import check_names, check_states
from spottrain.recovery.by_rank import ByRank, RankPart, advice_on, is_loader, rank_states_of
from spottrain.recovery.script_parts import Stateful
from spottrain.world.failures import UserError


@dataclass(frozen=True, slots=True)
class Attachment:
    """What is attached, by name.

    Attributes:
        models: Modules, as they were spread.
        optimizers: Their optimizers.
        schedulers: Schedules of learning rates, which the script steps.
        tensors: Tensors of no model.
        parts: Everything else with a state that is the same on all ranks, or in shards.
        by_rank: What is each rank's own.
    """

    models: dict[str, nn.Module] = field(default_factory=dict)
    optimizers: dict[str, Optimizer] = field(default_factory=dict)
    schedulers: dict[str, LRScheduler] = field(default_factory=dict)
    tensors: dict[str, torch.Tensor] = field(default_factory=dict)
    parts: dict[str, Stateful] = field(default_factory=dict)
    by_rank: dict[str, ByRank] = field(default_factory=dict)

    @classmethod
    def of(cls, attached: Mapping[str, Any]) -> Attachment:
        """Sort what is attached by kind. A collective. Raises UserError for what no commit can hold."""
        made = cls()
        _check_same_on_all_ranks(attached)
        for name, value in attached.items():
            _check_pace(name, value)
            _check_engine(name, value)
        attached = {name: inside(value) for name, value in attached.items()}
        for name, value in attached.items():
            made._add(name, value)
        check_names(attached)
        _check_each_is_one(attached)
        made._check_optimizers()
        check_states({**made.parts, **{name: _part(name, each.value) for name, each in made.by_rank.items()}})
        made._check_meshes()
        for model in made.models.values():
            check_same_model(model)
        return made

    def _add(self, name: str, value: Any) -> None:
        if isinstance(value, nn.Module):
            self.models[name] = _checked_model(name, value)
        elif isinstance(value, Optimizer):
            self.optimizers[name] = value
        elif isinstance(value, LRScheduler):
            self.schedulers[name] = value
        elif isinstance(value, torch.Tensor):
            self.tensors[name] = value
        elif isinstance(value, ByRank):
            self.by_rank[name] = value
        elif is_loader(value):
            self.by_rank[name] = ByRank(value)
        else:
            self.parts[name] = _part(name, value)

    def rank_parts(self, *, rank: int, world_size: int) -> dict[str, RankPart]:
        """The parts of this rank's own. Raises UserError for what no commit could hold."""
        made = {
            name: RankPart(
                part=_part(name, each.value),
                rank=rank,
                world_size=world_size,
                at_another_size=each.at_another_size,
            )
            for name, each in self.by_rank.items()
        }
        try:
            codec.encode_of_rank(rank_states_of(made), rank)
        except UnsupportedState as error:
            raise UserError(str(error)) from error
        return made

    def check_sizes(self, least: int, most: int) -> None:
        """Refuse what no resume at another number of ranks could restore, if the job may have `least` to `most`."""
        names = [name for name, each in self.by_rank.items() if each.at_another_size == "refuse"]
        if names and least != most:
            raise UserError(
                f"{names[0]} is each rank's own, and the job may run with {least} to {most} ranks: no resume could "
                "restore it at another number. Give nodes.min and nodes.max the same value, or "
                f"{advice_on(self.by_rank[names[0]].value)}"
            )

    def _check_meshes(self) -> None:
        """Refuse a tensor that is spread over some of the ranks alone. A collective."""
        named = [(f"{name}.{key}", each) for name, one in self.models.items() for key, each in one.named_parameters()]
        own = [(name, each) for name, each in [*named, *self.tensors.items()] if isinstance(each, DTensor)]
        outside = [name for name, each in own if each.device_mesh.get_coordinate() is None]
        for rank, names in enumerate(exchange.all_gather(outside[:1])):
            if names:
                raise UserError(
                    f"{names[0]} is spread over a mesh without rank {rank}, and the job has {dist.get_world_size()} "
                    "ranks; make the mesh of all of them, as by session.world_size, and let nodes.min and nodes.max "
                    "give the job numbers of ranks that the other dimensions of the mesh divide"
                )

    @property
    def stepped(self) -> dict[str, Optimizer]:
        """What the script steps: also optimizers of which each rank has a part."""
        by_rank = {name: each.value for name, each in self.by_rank.items() if isinstance(each.value, Optimizer)}
        return {**self.optimizers, **by_rank}

    def _check_optimizers(self) -> None:
        own: set[torch.Tensor] = {parameter for model in self.models.values() for parameter in model.parameters()}
        own |= set(self.tensors.values())
        for name, optimizer in self.stepped.items():
            try:
                state_dict_of(optimizer)
            except UnsupportedState as error:
                raise UserError(str(error)) from error
            foreign = [each for group in optimizer.param_groups for each in group["params"] if each not in own]
            if foreign:
                raise UserError(
                    f"the optimizer {name} trains {len(foreign)} parameters of nothing that is attached, the first "
                    f"of shape {list(foreign[0].shape)}; attach their model or tensor, too, as it was spread"
                )


def _checked_model(name: str, model: nn.Module) -> nn.Module:
    inner = (where for where, each in model.named_modules() if where and isinstance(each, DistributedDataParallel))
    if (where := next(inner, None)) is not None:
        raise UserError(
            f"{name} holds a DistributedDataParallel at {where!r}, and a single rank has none there; make it of the "
            "model inside, as in AveragedModel(model.module)"
        )
    return model


def _check_pace(name: str, value: Any) -> None:
    """Refuse a schedule that Accelerate steps once for each rank."""
    if getattr(value, "step_with_optimizer", False) and not getattr(value, "split_batches", True):
        raise UserError(
            f"{name} steps once for each rank, as accelerator.prepare makes it, so that its rates depend on their "
            "number; leave it out of accelerator.prepare, make it for the steps of the run, and step it once in each"
        )


def _check_engine(name: str, value: Any) -> None:
    """Refuse DeepSpeed's engine, which has counts and an optimizer of its own."""
    if any(kind.__name__ == "DeepSpeedEngine" for kind in type(value).__mro__):
        raise UserError(
            f"{name} is a DeepSpeedEngine, which accumulates, partitions and steps by itself, and a commit would not "
            "hold that; pass the model inside to session.prepare, with the job's strategy deepspeed"
        )


class _Values:
    """Implements Stateful for a dict, a list or an array of the script's, which is changed in place."""

    def __init__(self, values: dict[Any, Any] | list[Any] | np.ndarray[Any, Any]) -> None:
        self._values = values

    def state_dict(self) -> dict[str, Any]:
        return self._values if isinstance(self._values, dict) else {"values": self._values}

    def load_state_dict(self, state_dict: dict[str, Any], /) -> None:
        if isinstance(self._values, dict):
            self._values.clear()
            self._values.update(state_dict)
        else:
            self._values[:] = state_dict["values"]


def _part(name: str, value: Any) -> Stateful:
    """A part of the script's state. Whether it has one is checked later."""
    if isinstance(value, dict | list | np.ndarray):
        return _Values(value)
    if isinstance(value, bool | int | float | str | bytes | tuple | None):
        raise UserError(
            f"{name} is a {type(value).__name__}, which a resume can't change in place; attach a dict or a list that "
            "holds it, or an object with state_dict and load_state_dict"
        )
    part: Stateful = value
    return part


def _check_each_is_one(attached: Mapping[str, Any]) -> None:
    first: dict[int, str] = {}
    for name, value in attached.items():
        if (before := first.setdefault(id(value), name)) != name:
            raise UserError(f"{before} and {name} are the same object; attach it once")


def _check_same_on_all_ranks(attached: Mapping[str, Any]) -> None:
    own = [f"{name} ({type(value).__name__})" for name, value in attached.items()]
    if dist.get_world_size() > 1 and (difference := first_difference(own, None)) is not None:
        raise UserError(
            f"the ranks attach different things: {difference}; attach the same on all ranks, in the same order"
        )
