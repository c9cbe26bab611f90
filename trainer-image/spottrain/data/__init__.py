"""Which samples a rank reads, in which order, with which random numbers."""

from spottrain.data.mixtures.dataset import Mixture
from spottrain.data.packing import PackedDocuments, causal_mask, packed
from spottrain.data.shards.dataset import Shards
from spottrain.data.streams.dataset import Streams

__all__ = ["Mixture", "PackedDocuments", "Shards", "Streams", "causal_mask", "packed"]
