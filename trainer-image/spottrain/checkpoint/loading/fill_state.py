"""Fill a state in memory from a checkpoint."""

from __future__ import annotations

from typing import Any

import torch

from spottrain.checkpoint.errors import CheckpointMismatch
from spottrain.checkpoint.format import codec
from spottrain.checkpoint.format.dcp import load_tensors
from spottrain.checkpoint.format.manifest import DTYPES, Manifest
from spottrain.checkpoint.format.part_reader import PartReader


def filled(state: dict[str, Any], tensors: codec.Tensors, manifest: Manifest, parts: PartReader) -> dict[str, Any]:
    """Fill the `tensors` of `state` in place.

    Returns:
        The checkpoint's state, as far as `state` has keys for it, with these tensors in it.

    Raises:
        CheckpointMismatch: The checkpoint doesn't fit. Nothing was read, and `state` is as it was.
        CorruptCheckpoint: Stored bytes are damaged.
    """
    unknown = [key for key in state if key not in manifest.tree]
    if unknown:
        raise CheckpointMismatch(
            f"The checkpoint at step {manifest.step} has no {unknown[0]!r}: a different strategy or an older script "
            "made it. Use that one, or create a new job with a different checkpoint.uri."
        )
    tree = {key: manifest.tree[key] for key in state}
    stored = {name: manifest.tensors[name] for name in codec.tensors_in(tree)}
    load_tensors(tensors, manifest.model_copy(update={"tensors": stored}), parts)
    found: dict[str, Any] = codec.join(tree, tensors)
    return found


def tensors_of(tree: codec.Json, manifest: Manifest, parts: PartReader) -> codec.Tensors:
    """Read the tensors to which a tree refers, whole, to the host. Raises CorruptCheckpoint."""
    stored = {name: manifest.tensors[name] for name in codec.tensors_in(tree)}
    tensors = {name: torch.empty(each.shape, dtype=DTYPES[each.dtype]) for name, each in stored.items()}
    load_tensors(tensors, manifest.model_copy(update={"tensors": stored}), parts)
    return tensors
