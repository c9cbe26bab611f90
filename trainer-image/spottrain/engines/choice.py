"""Choosing the engine of a strategy."""

from __future__ import annotations

from torch import nn

from spottrain.engines.engine import EngineConfig, SpreadingEngine
from spottrain_api.settings.choices import Strategy


def spread_alone(strategy: str, config: EngineConfig, model: nn.Module) -> nn.Module:
    """Spread a model whose owner has the loop. A collective.

    Raises:
        UserError: Some of its gradients would not be averaged there.
    """
    if strategy == Strategy.FSDP:
        from spottrain.engines.fsdp import FsdpEngine

        engine = FsdpEngine(config)
        spread = engine.spread(model)
        engine.check_all_sharded()
        return spread
    from spottrain.engines.ddp import DdpEngine

    return DdpEngine(config).spread(model)


def choose_engine(strategy: str, config: EngineConfig) -> SpreadingEngine:
    """Create the engine of a strategy.

    Args:
        strategy: "ddp", "fsdp" or "deepspeed".
        config: What the engine needs to know.

    Raises:
        ValueError: The strategy is unknown, its settings contradict each other, or its library is missing.
    """
    # Imported when they are needed: parts of torch are slow to import, and DeepSpeed may not be installed.
    match strategy:
        case Strategy.DDP:
            from spottrain.engines.ddp import DdpEngine

            return DdpEngine(config)
        case Strategy.FSDP:
            from spottrain.engines.fsdp import FsdpEngine

            return FsdpEngine(config)
        case Strategy.DEEPSPEED:
            from spottrain.engines.deepspeed import DeepSpeedEngine

            return DeepSpeedEngine(config)
        case _:
            raise ValueError(f"strategy {strategy!r} is unknown; use auto, ddp, fsdp or deepspeed")
