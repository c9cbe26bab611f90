"""Choosing the engine of a strategy."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from spottrain.engines.engine import Engine, EngineConfig
from spottrain_api.settings.choices import Strategy

# spottrain.engines.auto chooses one of the others.
AUTO = Strategy.AUTO.value


def choose_engine(strategy: str, config: EngineConfig) -> Engine:
    """Create the engine of a strategy.

    Args:
        strategy: "ddp", "fsdp" or "deepspeed".
        config: What the engine needs to know.

    Raises:
        ValueError: The strategy is unknown, its settings contradict each other, or its library is missing.
    """
    engines: Mapping[str, Callable[[EngineConfig], Engine]] = {
        Strategy.DDP: _ddp,
        Strategy.FSDP: _fsdp,
        Strategy.DEEPSPEED: _deepspeed,
    }
    if strategy not in engines:
        raise ValueError(f"strategy {strategy!r} is unknown; use auto, ddp, fsdp or deepspeed")
    return engines[strategy](config)


# Imported when they are needed: parts of torch are slow to import, and DeepSpeed may not be installed.


def _ddp(config: EngineConfig) -> Engine:
    from spottrain.engines.ddp import DdpEngine

    return DdpEngine(config)


def _fsdp(config: EngineConfig) -> Engine:
    from spottrain.engines.fsdp import FsdpEngine

    return FsdpEngine(config)


def _deepspeed(config: EngineConfig) -> Engine:
    from spottrain.engines.deepspeed import DeepSpeedEngine

    return DeepSpeedEngine(config)
