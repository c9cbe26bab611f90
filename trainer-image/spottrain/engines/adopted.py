"""A model that another framework has spread, and computes with."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from pydantic.alias_generators import to_camel
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from spottrain.engines.buffers import SharedBuffers
from spottrain.engines.ddp import settle_buckets
from spottrain.engines.engine import MakeOptimizer
from spottrain.engines.native import frozen_names, load_named_state, named_state
from spottrain_api.contract import TrainerConfig


def refuse_unapplied(config: TrainerConfig, instead: Mapping[str, str]) -> None:
    """Raises ValueError where the job asks for what is only applied in a loop of this library's. `instead` says by
    the field where the framework has it."""
    fields = list(_unapplied(config))
    if fields:
        advice = ", ".join(
            f"{field} ({instead.get(field.partition('.')[0], 'the setting of that library')})" for field in fields
        )
        raise ValueError(
            "what the job says here has no effect in a loop that another library owns; leave it out of the job, and "
            f"use that library's own: {advice}"
        )


def _unapplied(config: TrainerConfig) -> Iterator[str]:
    """Fields of the job that aren't as they are by default, and would be ignored."""
    fields = TrainerConfig.model_fields
    for name in ("precision", "activation_checkpointing", "compile"):
        if getattr(config, name) != fields[name].default:
            yield to_camel(name)
    for part in ("fsdp", "deepspeed"):
        said, usual = getattr(config, part), fields[part].default
        yield from (
            f"{part}.{to_camel(name)}"
            for name in type(said).model_fields
            if getattr(said, name) != getattr(usual, name)
        )


class AdoptedEngine:
    """Implements Engine for loops that are not this library's: its state alone, as the framework calls
    backward, clips and updates by itself."""

    _model: nn.Module

    def __init__(self, optimizer: Optimizer) -> None:
        self._optimizer = optimizer

    @staticmethod
    def check(strategy: str, model: nn.Module, world_size: int) -> None:
        """Raises ValueError if the job wants another strategy than the framework has taken, or can take, if nobody
        has spread the model over several ranks, or if one process is to drive several GPUs, as the Trainer without
        torchrun does."""
        if isinstance(model, nn.DataParallel):
            raise ValueError(
                f"one process has spread the model over {len(model.device_ids)} GPUs (nn.DataParallel); start the "
                "script with torchrun and a rank for each GPU, or show it one by CUDA_VISIBLE_DEVICES"
            )
        if strategy == "deepspeed":
            raise ValueError(
                "strategy deepspeed needs spottrain's own loop (session.prepare); with another library's use its DDP "
                "or FSDP2, and auto, ddp or fsdp in the job"
            )
        if any(isinstance(module, FSDPModule) for module in model.modules()):
            taken = "fsdp"
        elif isinstance(model, DistributedDataParallel):
            taken = "ddp"
        elif world_size > 1:
            raise ValueError(
                f"the framework has not spread the model over the {world_size} ranks, so that each would train one "
                "of its own; pass the model as the framework's prepare returns it, and let it use DDP or FSDP2"
            )
        else:
            return  # one rank alone, which frameworks leave as it is
        if strategy not in ("auto", taken):
            raise ValueError(
                f"the job's strategy is {strategy}, but the framework has spread the model as {taken}; set the "
                "framework's strategy in its own arguments, and the job's to the same or to auto"
            )

    def wrap(self, model: nn.Module, optimizer: MakeOptimizer) -> tuple[nn.Module, Optimizer]:
        self._model, self._buffers = model, SharedBuffers(model)
        # DDP that looks for unused parameters leaves its buckets as they are.
        if isinstance(model, DistributedDataParallel) and not model.find_unused_parameters:
            settle_buckets(model, model.module)
        return model, self._optimizer

    def begin_micro_batch(self, *, is_last: bool) -> None:
        """The framework's business."""

    def backward(self, loss: Any) -> None:
        """Not called: the framework has its own."""
        raise RuntimeError("an adopted model's gradients are computed by its framework; call its own backward")

    def update(self) -> None:
        """The framework has done it. What is left are buffers, which ranks have apart until DDP's next forward, and
        under FSDP2 for good."""
        self._buffers.share()

    def gradients_are_finite(self) -> bool:
        """The framework's business: they may be scaled for fp16, where it is usual that they aren't."""
        return True

    def discard(self) -> None:
        """Without gradients, the update that the framework goes on to make changes nothing."""
        self._optimizer.zero_grad(set_to_none=True)

    def state(self) -> dict[str, Any]:
        return named_state(self._model, self._optimizer)

    def frozen(self) -> set[str]:
        return frozen_names(self._model)

    def load_state(self, state: dict[str, Any]) -> None:
        load_named_state(self._model, self._optimizer, state)
