"""Bytes that nodes read of a bucket while the run changes its size.

To run: `python -m benchmarks.loading.resizes FOLDER`. An epoch of 1,000 small shards is read by nodes of
changing number, such as 6, 4, 3 and 6, a quarter each. Each node has a cache of its own. Nodes that stay keep
theirs, and those that come begin with an empty one. It prints JSON.
"""

from __future__ import annotations

import argparse
import json
import tempfile
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from spottrain.data import Shards
from spottrain.data.batch import BatchPlan
from spottrain.data.shards.formats import Tokens
from spottrain.data.shards.make_index import make_index
from spottrain.data.shards.store import ShardPlace

NUM_SHARDS = 1000
SAMPLES_PER_SHARD = 24
BATCH = 24
NODES = ((6, 4, 3, 6), (4, 2, 1, 4), (8, 5, 7, 8))
LANES_AND_WINDOWS = ((8, 4), (12, 2), (24, 1))
TOKENS = Tokens(context=16)


def measure(folder: Path, nodes: Sequence[int], lanes: int, window: int) -> float:
    """Bytes that all nodes have fetched, as a share of the data."""
    caches: list[Shards] = []
    fetched, num_steps = 0, NUM_SHARDS * SAMPLES_PER_SHARD // BATCH
    for quarter, num_nodes in enumerate(nodes):
        fetched += sum(_fetched(each) for each in caches[num_nodes:])
        caches = caches[:num_nodes]
        caches += [_opened(folder, min(nodes), lanes, window) for _ in range(num_nodes - len(caches))]
        plan = BatchPlan(global_batch=BATCH, micro_batch=BATCH, world_size=num_nodes)
        order = caches[0].order(seed=1, shuffle=True, global_batch=BATCH)
        for step in range(quarter * num_steps // len(nodes), (quarter + 1) * num_steps // len(nodes)):
            for node, shards in enumerate(caches):
                share = plan.share(node, range(step * BATCH, (step + 1) * BATCH))
                shards.__getitems__(order.samples(share).tolist())
    fetched += sum(map(_fetched, caches))
    return fetched / int(caches[0].index.sizes.sum())


def write(folder: Path) -> None:
    (folder / "shards").mkdir()
    for number in range(NUM_SHARDS):
        row = np.arange(SAMPLES_PER_SHARD * TOKENS.context + 1, dtype=np.uint16)
        row.tofile(folder / "shards" / f"{number:05d}.bin")
    make_index(ShardPlace.of(_uri(folder)), TOKENS)


def _opened(folder: Path, fewest: int, lanes: int, window: int) -> Shards:
    cache = Path(tempfile.mkdtemp(dir=folder))
    # Room for twice the shards that a node of the smallest world reads side by side.
    room = 2 * -(-lanes // fewest) * (window + 1) * 2 * (SAMPLES_PER_SHARD * TOKENS.context + 1)
    return Shards(_uri(folder), format=TOKENS, cache=cache, cache_bytes=room, window=window, lanes=lanes)


def _fetched(shards: Shards) -> int:
    return shards.cache.fetched.totals().all


def _uri(folder: Path) -> str:
    return f"file://{folder}/shards/*.bin"


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("folder", type=Path)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=arguments.folder) as folder:
        write(Path(folder))
        found = {
            f"nodes={nodes}, lanes={lanes}, window={window}": measure(Path(folder), nodes, lanes, window)
            for nodes in NODES
            for lanes, window in LANES_AND_WINDOWS
        }
        print(json.dumps(found))


if __name__ == "__main__":
    main()
