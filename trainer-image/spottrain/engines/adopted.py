"""A model that another framework has spread and trains."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from pydantic.alias_generators import to_camel
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.nn.parallel import DistributedDataParallel

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


def check_spread(strategy: str, model: nn.Module, world_size: int) -> None:
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
