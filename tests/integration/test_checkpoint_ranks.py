"""Checkpoints written and read by real gloo ranks, one process each."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from forked_ranks import forked_ranks
from object_stores import ObjectStore
from spottrain.checkpoint.checkpointer import Checkpointer
from spottrain.checkpoint.format.head import read_head
from spottrain.checkpoint.format.manifest import Manifest, read_manifest
from spottrain.checkpoint.stores.uri import open_storage

SCRIPT = Path(__file__).with_name("checkpoint_ranks.py")


@dataclass(frozen=True)
class Ranks:
    """Starts what checkpoint_ranks.py does, on ranks that are forked."""

    fork: Any

    def run(
        self, scenario: str, world_size: int, generation: int, uri: str, folder: Path, **environment: str
    ) -> None:
        """Run a scenario on `world_size` ranks; whatever happens, none of them is left."""
        folder.mkdir(exist_ok=True)
        logs = [folder / f"{scenario}-{generation}-{rank}.log" for rank in range(world_size)]
        settings = [
            {
                "scenario": scenario,
                "uri": uri,
                "folder": folder,
                "rank": rank,
                "world_size": world_size,
                "generation": generation,
                "log": log,
                # The process that forks them may be older than what a fixture has set.
                "environment": {**os.environ, **environment},
            }
            for rank, log in enumerate(logs)
        ]
        with forked_ranks(self.fork, SCRIPT, settings) as ranks:
            pass
        for rank, (process, log) in enumerate(zip(ranks, logs, strict=True)):
            assert process.exitcode == 0, (
                f"rank {rank} of {scenario} ended with {process.exitcode}:\n{log.read_text()}"
            )


@pytest.fixture
def ranks(fork: Any) -> Ranks:
    return Ranks(fork)


def newest_manifest(uri: str, endpoint_url: str | None = None) -> Manifest:
    storage = open_storage(uri, endpoint_url=endpoint_url)
    head = read_head(storage)
    assert head is not None
    assert head.newest is not None
    return read_manifest(storage, head.newest)


def test_fsdp_saved_by_3_ranks_loads_bit_for_bit_at_other_world_sizes(ranks: Ranks, tmp_path: Path) -> None:
    uri = f"file://{tmp_path}/store"
    ranks.run("save", 3, 1, uri, tmp_path / "ranks")
    for generation, world_size in enumerate((1, 2, 4), start=2):
        ranks.run("load", world_size, generation, uri, tmp_path / "ranks", TEST_SAVED_BY="3")


def test_fsdp_on_s3_from_2_ranks_to_3(
    ranks: Ranks,
    tmp_path: Path,
    s3_store: ObjectStore,
    s3_credentials: None,
) -> None:
    uri = f"s3://{s3_store.new_bucket()}/job"
    ranks.run("save", 2, 1, uri, tmp_path / "ranks", TEST_ENDPOINT=s3_store.endpoint_url)
    ranks.run("load", 3, 2, uri, tmp_path / "ranks", TEST_SAVED_BY="2", TEST_ENDPOINT=s3_store.endpoint_url)


def test_ddp_writes_every_byte_once_spread_over_the_ranks(ranks: Ranks, tmp_path: Path) -> None:
    uri = f"file://{tmp_path}/store"
    ranks.run("save_ddp", 3, 1, uri, tmp_path / "ranks")
    manifest = newest_manifest(uri)
    assert all(len(tensor.chunks) == 1 for tensor in manifest.tensors.values())
    assert all(file.size > 0 for file in manifest.files)
    ranks.run("load_ddp", 2, 2, uri, tmp_path / "ranks", TEST_SAVED_BY="3")


def test_each_shard_damaged_in_turn_is_noticed_and_the_commit_before_is_found(ranks: Ranks, tmp_path: Path) -> None:
    uri = f"file://{tmp_path}/store"
    ranks.run("save", 3, 1, uri, tmp_path / "ranks")
    storage = open_storage(uri)
    head = read_head(storage)
    assert head is not None
    newest, before = head.commits
    shards = [key for key, _ in storage.list(newest.attempt) if key.endswith((".data", "manifest.json"))]
    assert len(shards) == 4
    reader = Checkpointer(storage, generation=2, attempt_id="reader", rank=0, world_size=1)
    assert reader.latest(verify=True) == newest
    for shard in shards:
        whole = storage.get(shard)[0]
        other = storage.get(next(key for key in shards if key != shard))[0]
        middle = len(whole) // 2
        flipped = whole[:middle] + bytes([whole[middle] ^ 1]) + whole[middle + 1 :]
        for damaged in (whole[:-1], b"", flipped, other, None):
            storage.delete([shard])
            if damaged is not None:
                storage.put(shard, damaged)
            assert reader.latest(verify=True) == before, (shard, damaged)
        storage.put(shard, whole)
    assert reader.latest(verify=True) == newest


def test_ranks_agree_on_what_becomes_of_a_save(ranks: Ranks, tmp_path: Path) -> None:
    ranks.run("agreement", 2, 1, f"file://{tmp_path}/store", tmp_path / "ranks")
