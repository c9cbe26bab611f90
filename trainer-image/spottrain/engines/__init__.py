"""Engines: how a model is spread over the ranks."""

from spottrain.engines.engine import Engine, EngineConfig, MakeOptimizer, choose_engine

__all__ = ["Engine", "EngineConfig", "MakeOptimizer", "choose_engine"]
