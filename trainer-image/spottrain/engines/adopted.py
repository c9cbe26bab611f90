"""A model that another framework has spread and trains."""

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
from spottrain.engines.gathered import GatheredParameters
from spottrain.engines.model_state import without_wrapper
from spottrain.engines.native import NamedState
from spottrain.engines.step_agreement import StepAgreement
from spottrain.world.failures import UserError
from spottrain_api.contract.configuration import TrainerConfig


def refuse_unapplied(config: TrainerConfig, instead: Mapping[str, str]) -> None:
    """Refuse settings of the job that only this library's own loop applies.

    Args:
        config: The job's settings.
        instead: The framework's own name for a setting, by the job's field.

    Raises:
        ValueError: The job has such settings.
    """
    fields = list(_unapplied(config))
    if fields:
        advice = ", ".join(
            f"{field} ({instead.get(field.partition('.')[0], 'the setting of that library')})" for field in fields
        )
        raise ValueError(
            "these settings of the job have no effect in a loop that another library owns; leave them out of the "
            f"job, and use that library's own: {advice}"
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


class AdoptedEngine(NamedState):
    """Implements Engine for the loops of other frameworks.

    It handles only the state, because the framework calls backward, clips and updates itself.
    """

    def __init__(self, optimizer: Optimizer) -> None:
        self._optimizer = optimizer

    @staticmethod
    def check(strategy: str, model: nn.Module, world_size: int) -> None:
        """Check how the framework has spread the model.

        Raises:
            ValueError: The job's strategy is not the framework's, or one that frameworks cannot use; the model is not
                spread over the ranks; or one process drives several GPUs, as the Trainer does without torchrun.
        """
        if isinstance(model, nn.DataParallel):
            raise ValueError(
                f"one process has spread the model over {len(model.device_ids)} GPUs (nn.DataParallel); start the "
                "script with torchrun and one rank per GPU, or set CUDA_VISIBLE_DEVICES to one GPU"
            )
        if strategy == "deepspeed":
            raise ValueError(
                "strategy deepspeed needs spottrain's own loop (session.prepare); in the loop of another library, "
                "use its DDP or FSDP2, and auto, ddp or fsdp in the job"
            )
        if any(isinstance(module, FSDPModule) for module in model.modules()):
            used = "fsdp"
        elif isinstance(model, DistributedDataParallel):
            used = "ddp"
        elif world_size > 1:
            raise ValueError(
                f"the framework has not spread the model over the {world_size} ranks, so that each would train a "
                "model of its own; pass the model as the framework's prepare returns it, and let it use DDP or FSDP2"
            )
        else:
            return  # frameworks do not wrap the model of a single rank
        if strategy not in ("auto", used):
            raise ValueError(
                f"the job's strategy is {strategy}, but the framework has spread the model as {used}; set the "
                "framework's strategy in its own arguments, and the job's to the same or to auto"
            )

    def wrap(self, model: nn.Module, optimizer: MakeOptimizer) -> tuple[nn.Module, Optimizer]:
        self._model, self._buffers = model, SharedBuffers(without_wrapper(model))
        self._gathered = GatheredParameters(model)
        self._agreement = StepAgreement(self._buffers)
        self._optimizer.register_step_pre_hook(lambda *_: self._require_rest())
        # DDP that finds unused parameters does not rearrange its buckets. DDP with a static graph learns the graph
        # from its first backward pass, which has to be the script's.
        if isinstance(model, DistributedDataParallel) and not (model.find_unused_parameters or model.static_graph):
            settle_buckets(model, model.module)
        return model, self._optimizer

    def begin_micro_batch(self, *, is_last: bool) -> None:
        """Does nothing: the framework synchronises gradients."""

    def backward(self, loss: Any) -> None:
        """Not called: the framework calls backward."""
        raise RuntimeError("an adopted model's gradients are computed by its framework; call its own backward")

    def update(self) -> None:
        """Share the buffers.

        The framework has made the update; buffers would differ between ranks until DDP's next forward pass, and for
        ever under FSDP2.
        """
        self._agreement.reach()
        self._buffers.share()

    def _at_rest(self) -> nn.Module:
        self._gathered.reshard()
        return self._model

    def _require_rest(self) -> None:
        """Refuse an update whose gradients the framework may have clipped or checked without seeing them."""
        if (name := self._gathered.first()) is not None:
            raise UserError(
                f"The model was called between the last backward pass and the optimizer's step, and its parameter "
                f"{name} has been gathered since: what clips or checks gradients in between has not seen them. Call "
                "the model after the step, or set reshard_after_forward of the framework's FSDP plugin to True."
            )

    def gradients_are_finite(self) -> bool:
        """Always true. The framework checks: gradients may be scaled for fp16, and are then often not finite."""
        return True

    def discard(self) -> None:
        """Clear the gradients, so that the framework's update changes nothing."""
        self._optimizer.zero_grad(set_to_none=True)
