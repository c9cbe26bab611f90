"""The contents of a job's checkpoint folder, read as a rank reads them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from spottrain.checkpoint.format.dcp import load_tensors
from spottrain.checkpoint.format.head import read_head
from spottrain.checkpoint.format.manifest import DTYPES, read_manifest
from spottrain.checkpoint.format.part_reader import PartReader
from spottrain.checkpoint.stores.uri import open_storage


def newest_commit(folder: Path) -> tuple[int, dict[str, torch.Tensor], Any]:
    """Step, tensors and all else of it."""
    storage = open_storage(f"file://{folder}")
    head = read_head(storage)
    assert head is not None
    assert head.newest is not None
    manifest = read_manifest(storage, head.newest)
    tensors = {name: torch.empty(t.shape, dtype=DTYPES[t.dtype]) for name, t in manifest.tensors.items()}
    load_tensors(tensors, manifest, PartReader(storage, head.newest.attempt, manifest))
    return head.newest.step, tensors, manifest.tree
