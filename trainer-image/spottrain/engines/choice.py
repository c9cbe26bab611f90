"""Which engine a strategy stands for."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from torch import nn

from spottrain.engines.engine import Engine, EngineConfig

# Below, every rank can hold parameters, gradients and Adam's two moments in fp32 (8 GB), and replicas need
# less communication than shards. It depends on the model alone, so that all generations choose the same.
AUTO_SHARD_PARAMETERS = 500_000_000


def choose_engine(strategy: str, model: nn.Module, config: EngineConfig) -> Engine:
    """The engine of that strategy (auto, ddp, fsdp, deepspeed). Raises ValueError, with a sentence, for any
    other, and where the engine's library is missing."""
    if strategy == "auto":
        num_parameters = sum(parameter.numel() for parameter in model.parameters())
        strategy = "fsdp" if num_parameters >= AUTO_SHARD_PARAMETERS else "ddp"
    engines: Mapping[str, Callable[[EngineConfig], Engine]] = {"ddp": _ddp, "fsdp": _fsdp, "deepspeed": _deepspeed}
    if strategy not in engines:
        raise ValueError(f"strategy {strategy!r} is unknown; use auto, ddp, fsdp or deepspeed")
    return engines[strategy](config)


# Imported when they are needed: torch's parts take their time, and DeepSpeed need not be installed.


def _ddp(config: EngineConfig) -> Engine:
    from spottrain.engines.ddp import DdpEngine

    return DdpEngine(config)


def _fsdp(config: EngineConfig) -> Engine:
    from spottrain.engines.fsdp import FsdpEngine

    return FsdpEngine(config)


def _deepspeed(config: EngineConfig) -> Engine:
    from spottrain.engines.deepspeed import DeepSpeedEngine

    return DeepSpeedEngine(config)
