"""Which engine a strategy stands for."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from spottrain.engines.engine import Engine, EngineConfig
from spottrain_api.contract import Strategy

# Chosen by spottrain.engines.auto.
AUTO = Strategy.AUTO.value


def choose_engine(strategy: str, config: EngineConfig) -> Engine:
    """The engine of that strategy (ddp, fsdp, deepspeed). Raises ValueError, with a sentence, for any other, and
    where the engine's library is missing."""
    engines: Mapping[str, Callable[[EngineConfig], Engine]] = {
        Strategy.DDP: _ddp,
        Strategy.FSDP: _fsdp,
        Strategy.DEEPSPEED: _deepspeed,
    }
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
