"""Which samples a rank reads, in which order, with which random numbers."""

from spottrain.data.shards.dataset import Shards

__all__ = ["Shards"]
