"""Engines: how a model is spread over the ranks."""
