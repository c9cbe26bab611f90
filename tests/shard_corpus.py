"""A small corpus in shards of JSON lines, for ranks that tests start."""

from __future__ import annotations

import json
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch

from spottrain.data import Shards
from spottrain.data.shards.formats import JsonLines
from spottrain.data.shards.make_index import make_index
from spottrain.data.shards.store import ShardPlace

NUM_SHARDS = 12
WINDOW = 2
LANES = 3


def write_corpus(folder: Path, num_samples: int, width: int) -> str:
    """Write shards of different lengths, and their index; their URI."""
    folder.mkdir(parents=True)
    generator = torch.Generator().manual_seed(1)
    inputs = torch.randn(num_samples, width, generator=generator).tolist()
    ends = [num_samples * shard**2 // NUM_SHARDS**2 for shard in range(NUM_SHARDS + 1)]
    for shard, (begin, end) in enumerate(pairwise(ends)):
        lines = [json.dumps({"x": x, "y": sum(x)}) + "\n" for x in inputs[begin:end]]
        (folder / f"{shard:02d}.jsonl").write_text("".join(lines))
    uri = f"file://{folder}/*.jsonl"
    make_index(ShardPlace.of(uri), JsonLines())
    return uri


def corpus(uri: str, cache: Path, cache_bytes: int) -> Shards:
    """The data set of `write_corpus`."""
    return Shards(
        uri, format=JsonLines(decode=_decode), cache=cache, cache_bytes=cache_bytes, window=WINDOW, lanes=LANES
    )


def _decode(value: dict[str, Any]) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.tensor(value["x"]), torch.tensor(value["y"])
