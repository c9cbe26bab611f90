"""ZeRO: DeepSpeed spreads the state of training over the ranks.

It spreads optimizer state (stage 1), gradients (stage 2) and parameters (stage 3).
"""

from __future__ import annotations

import contextlib
import importlib
import logging
import os
import warnings
from collections.abc import Sequence
from typing import Any
from unittest import mock

import torch
from torch import nn
from torch.optim import Optimizer

from spottrain.engines.averages import LostChanges, copy_buffers, follow, follow_in_parts, pairs
from spottrain.engines.buffers import SharedBuffers
from spottrain.engines.deepspeed_config import merged_config
from spottrain.engines.deepspeed_limits import refuse_counters, unfit_for_zero, unfit_optimizer
from spottrain.engines.deepspeed_state import ReplicaState, ZeroState, state_of
from spottrain.engines.engine import EngineConfig, MakeOptimizer
from spottrain.engines.model_state import changing_values, frozen_names
from spottrain.engines.named_state import MODEL
from spottrain.engines.own_numbers import watch_numbers
from spottrain.engines.precision import autocast_forward, cast_around, weights_in_fp32
from spottrain.engines.same_order import SameParameters
from spottrain.engines.step_agreement import StepAgreement
from spottrain.engines.trained import TrainedParameters
from spottrain.engines.used import UsedParameters
from spottrain.world.failures import UserError

CHANGED_USE = (
    "The parameter {} has a gradient in some steps and none in others, as those of networks that are trained in "
    "turns. ZeRO updates all parameters in each step, also those without a gradient, which a plain loop leaves "
    "alone. Use the strategy fsdp or ddp, or deepspeed.zeroStage 0."
)
AVERAGE_IN_HALF = (
    "DeepSpeed keeps weights that are not trained in the job's precision, in which an average loses most of "
    "its small changes. Use the strategy fsdp or ddp, which keep them in fp32, or precision fp32."
)
LOSS_SCALER = "loss_scaler"
# Attributes of DeepSpeed's DynamicLossScaler that change during training. A static scaler has the scale alone.
_SCALER_STATE = ("cur_scale", "cur_iter", "last_overflow_iter", "cur_hysteresis")
# Elements. DeepSpeed allocates its default bucket of this size for any model.
_LARGEST_BUCKET = 500_000_000
# Types that DeepSpeed casts to the precision of the computation.
_CAST = (torch.float16, torch.bfloat16, torch.float32, torch.float64)


class DeepSpeedEngine:
    """Implements Engine. DeepSpeed's own checkpoints and loops are not used."""

    _engine: Any  # deepspeed.DeepSpeedEngine, of a library without types
    _used_before: list[bool] | None = None  # under ZeRO, the parameters that the step before has used
    _base: Optimizer  # the script's, on which DeepSpeed's works
    _state: ReplicaState | ZeroState

    def __init__(self, config: EngineConfig) -> None:
        """Raises ValueError for contradictory settings, and if DeepSpeed is missing."""
        self._config = config
        self._settings = merged_config(config)
        self._library = _import_library(config.device)
        if config.precision is torch.float16 and not self._library.get_accelerator().is_fp16_supported():
            raise ValueError(
                f"precision fp16 needs GPUs: DeepSpeed can't compute in it on this {config.device.type.upper()}; use "
                "bf16 or fp32"
            )

    def wrap(self, model: nn.Module, optimizer: MakeOptimizer) -> tuple[nn.Module, Optimizer]:
        """Raises UserError for a model or an optimizer that DeepSpeed can't use."""
        config, stage = self._config, self._settings["zero_optimization"]["stage"]
        _raise_if(unfit_for_zero(model, stage, config.precision))
        if stage == 0:
            model.to(config.device)  # at other stages DeepSpeed casts first, which moves less
        if config.precision is not torch.float32:
            if stage == 0:
                weights_in_fp32(model)
                autocast_forward(model, config.device, config.precision)
            else:
                cast_around(model, config.precision)
        if "activation_checkpointing" in self._settings:
            # For models that call deepspeed.checkpointing.checkpoint; torch.utils.checkpoint needs nothing.
            self._library.checkpointing.configure(None, deepspeed_config=self._settings)
        num_parameters = sum(parameter.numel() for parameter in model.parameters())
        bucket = min(num_parameters, _LARGEST_BUCKET)
        self._settings["zero_optimization"].setdefault("reduce_bucket_size", bucket)
        names = {parameter: name for name, parameter in model.named_parameters()}
        base = optimizer(model)
        _raise_if(unfit_optimizer(base, stage))
        _import_muon()
        with _with_scalars(model), contextlib.redirect_stdout(None):  # its memory statistics, several lines a rank
            if stage == 3:
                self._partition(model)
            self._engine, *_ = self._library.initialize(
                model=model, optimizer=base, config=self._settings, dist_init_required=False
            )
        if stage == 0:
            # DeepSpeed's own function, which other stages do not use, cannot clip a scalar's gradient.
            self._engine.clip_fp32_gradients = self._clip
        elif self._config.plan.world_size > 1:
            self._check_before_sums(SameParameters(names))
        self._base = getattr(self._engine.optimizer, "optimizer", self._engine.optimizer)
        watch_numbers(self._base)
        self._buffers = SharedBuffers(model)
        self._buffers.share()
        self._trained = TrainedParameters(model)
        self._lost_changes = LostChanges(model) if stage == 3 else None
        self._used = UsedParameters(names)
        self._used.watch_all()
        self._agreement = StepAgreement(self._buffers, self._used if stage == 0 else None)
        self._state = state_of(self._engine, self._base, names)
        if stage == 3:
            refuse_counters(self._base, len(self._engine.optimizer.fp32_partitioned_groups_flat))
        wrapped: nn.Module = self._engine
        return wrapped, self._base

    def _partition(self, model: nn.Module) -> None:
        """Give each rank its part of each parameter in turn.

        `initialize` would first move the whole model to the device. It does not cast the parameters of a partitioned
        model, nor move its buffers.
        """
        if self._config.precision is not torch.float32:
            for parameter in model.parameters():
                if parameter.dtype in _CAST:
                    parameter.data = parameter.data.to(self._config.precision)
        backend = self._library.get_accelerator().communication_backend_name()
        self._library.init_distributed(backend, dist_init_required=False)
        self._library.zero.Init(module=model, config_dict_or_path=self._settings)
        for buffer in model.buffers():
            buffer.data = buffer.data.to(self._config.device)

    def begin_micro_batch(self, *, is_last: bool) -> None:
        self._engine.set_gradient_accumulation_boundary(is_last)

    def backward(self, loss: torch.Tensor) -> None:
        self._used.begin_pass()
        self._engine.backward(loss, scale_wrt_gas=False)

    def update(self) -> None:
        """Step the optimizer. DeepSpeed clips gradients itself, and skips a step whose gradients are not finite."""
        self._trained.check(may_freeze=False)
        if self._lost_changes is not None:
            self._lost_changes.check()
        self._agree()
        self._engine.step()
        self._buffers.share()

    def update_average(self, average: nn.Module, source: nn.Module, decay: float) -> None:
        of_pairs = pairs([self._engine.module], average, source)
        if any(each.dtype in (torch.bfloat16, torch.float16) for each, _ in of_pairs):
            raise UserError(AVERAGE_IN_HALF)
        if self._settings["zero_optimization"]["stage"] == 3:
            follow_in_parts(of_pairs, decay)
        else:
            follow(of_pairs, decay)
        copy_buffers(average, source)

    def gradients_are_finite(self) -> bool:
        """Always true: gradients are in DeepSpeed's own buffers.

        DeepSpeed checks them in its update, except in bf16.
        """
        return True

    def discard(self) -> None:
        """Step DeepSpeed with an optimizer that does nothing. Only DeepSpeed's step clears its buffers."""
        self._agree()
        step = self._base.step
        self._base.step = _do_nothing  # type: ignore[assignment, method-assign]
        try:
            self._engine.step()
        finally:
            self._base.step = step  # type: ignore[method-assign]
        self._buffers.share()

    def _agree(self) -> None:
        """Find what no rank has used, before an update or instead of one. A collective.

        Raises:
            UserError: ZeRO would update a parameter that this step hasn't used, and steps before have, or the
                other way round.
        """
        if self._engine.zero_optimization():
            used = self._used.pop_step()
            if self._used_before not in (None, used):
                changed = [now != before for now, before in zip(used, self._used_before, strict=True)]
                raise UserError(CHANGED_USE.format(next(self._used.names(changed))))
            self._used_before = used
        self._agreement.reach()

    def _check_before_sums(self, parameters: SameParameters) -> None:
        """Check the parameters before the last sum over the ranks in a backward pass.

        It is the only sum, unless a bucket was full before.
        """
        add_up = self._engine.allreduce_gradients

        def check_and_add_up() -> None:
            if (
                self._engine.is_gradient_accumulation_boundary()
                or self._engine.zero_optimization_partition_gradients()
            ):
                parameters.check()
            add_up()

        self._engine.allreduce_gradients = check_and_add_up

    def _clip(self) -> None:
        nn.utils.clip_grad_norm_(self._engine.module.parameters(), self._engine.gradient_clipping())

    def state(self) -> dict[str, Any]:
        return self._state.state() | self._scaler_state()

    def room(self, saved: dict[str, Any]) -> dict[str, Any]:
        return self._state.room(saved) | self._scaler_state()

    def try_load(self) -> None:
        self._state.try_load()

    def _scaler_state(self) -> dict[str, Any]:
        if self._config.precision is not torch.float16:
            return {}
        scaler = self._engine.optimizer.loss_scaler
        return {LOSS_SCALER: {name: getattr(scaler, name) for name in _SCALER_STATE if hasattr(scaler, name)}}

    def model_state(self) -> dict[str, Any]:
        return self._state.model_state()

    def frozen(self) -> set[str]:
        return {f"model.{name}" for name in frozen_names(self._engine.module)}

    def state_in_use(self) -> dict[str, Any]:
        return self.state()

    def frozen_in_use(self) -> set[str]:
        return self.frozen()

    def changing(self) -> dict[str, dict[str, Any]]:
        return {MODEL: changing_values(self._engine.module)}

    def beside(self) -> Sequence[torch.Tensor]:
        return ()

    def load_state(self, state: dict[str, Any]) -> None:
        self._state.load_state(state)
        for name, value in state.get(LOSS_SCALER, {}).items():
            setattr(self._engine.optimizer.loss_scaler, name, value)


def _raise_if(refusal: str | None) -> None:
    if refusal is not None:
        raise UserError(refusal)


def _do_nothing(*_: Any, **__: Any) -> None:
    """An optimizer's step that changes nothing."""


def _with_scalars(model: nn.Module) -> contextlib.AbstractContextManager[Any]:
    """Make DeepSpeed broadcast parameters without dimensions.

    It views parameters as bytes, which torch refuses for these.
    """
    if all(parameter.dim() for parameter in model.parameters()):
        return contextlib.nullcontext()
    original = torch.Tensor.view

    def view(tensor: torch.Tensor, *args: Any) -> torch.Tensor:
        return original(tensor.reshape(1) if tensor.dim() == 0 and args == (torch.uint8,) else tensor, *args)

    return mock.patch.object(torch.Tensor, "view", view)


def _import_muon() -> None:
    """Import DeepSpeed's Muon without torch's compiler.

    DeepSpeed checks whether an optimizer is its Muon, and that module compiles at its import: to load the compiler
    takes each rank 2.5 s. A script with Muon has imported it.
    """
    with mock.patch.dict(os.environ, TORCHDYNAMO_DISABLE="1"), contextlib.suppress(ImportError):
        importlib.import_module("deepspeed.runtime.zero.muon.muon_optimizer")


def _import_library(device: torch.device) -> Any:
    # Read at the import. Otherwise the library chooses by what it finds on the machine.
    os.environ.setdefault("DS_ACCELERATOR", device.type)
    os.environ.setdefault("LOCAL_RANK", "0")  # DeepSpeed needs it, and only torchrun sets it
    # The ranks of a node that compute on CPUs. Otherwise ZeRO 3 starts numactl in each backward pass to count them.
    os.environ.setdefault("LOCAL_SIZE", os.environ.get("LOCAL_WORLD_SIZE", "1"))
    try:
        library = importlib.import_module("deepspeed")
    except ImportError as error:
        raise ValueError(
            "strategy deepspeed needs the package deepspeed, which is not installed; install "
            f"spottrain[deepspeed], or use the strategy fsdp ({error})"
        ) from error
    # Collectives for ranks on the CPU of one host. Compiling them would take minutes when the first job starts.
    library.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    logging.getLogger("DeepSpeed").setLevel(logging.WARNING)
    # Otherwise shown at every step; DeepSpeed has to adapt.
    warnings.filterwarnings("ignore", r".*reduce_scatter_tensor. is deprecated", FutureWarning)
    return library
