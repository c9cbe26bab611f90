"""Engines: how a model is spread over the ranks."""

from spottrain.engines.choice import AUTO, choose_engine
from spottrain.engines.engine import Engine, EngineConfig, MakeOptimizer

__all__ = ["AUTO", "Engine", "EngineConfig", "MakeOptimizer", "choose_engine"]
