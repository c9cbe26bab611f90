"""Checkpoints written and read by real gloo ranks, one process each."""

from __future__ import annotations

import os
import subprocess
import sys
from contextlib import ExitStack
from pathlib import Path

from spottrain.checkpoint import Checkpointer, open_storage, read_head
from spottrain.checkpoint.manifest import Manifest, read_manifest

SCRIPT = Path(__file__).with_name("checkpoint_ranks.py")
TIMEOUT_SECONDS = 240


def run_ranks(scenario: str, world_size: int, generation: int, uri: str, folder: Path, **environment: str) -> None:
    """Run a scenario on `world_size` ranks; whatever happens, none of them is left."""
    folder.mkdir(exist_ok=True)
    settings = {**os.environ, "OMP_NUM_THREADS": "1", **environment}
    with ExitStack() as stack:
        ranks = []
        for rank in range(world_size):
            log = stack.enter_context((folder / f"{scenario}-{generation}-{rank}.log").open("w+"))
            command = [
                sys.executable,
                str(SCRIPT),
                scenario,
                uri,
                str(folder),
                str(rank),
                str(world_size),
                str(generation),
            ]
            process = subprocess.Popen(command, stdout=log, stderr=log, env=settings)
            stack.callback(process.wait)
            stack.callback(process.kill)
            ranks.append((process, log))
        for rank, (process, log) in enumerate(ranks):
            try:
                code: int | str = process.wait(TIMEOUT_SECONDS)
            except subprocess.TimeoutExpired:
                code = "timeout"
            log.seek(0)
            assert code == 0, f"rank {rank} of {scenario} ended with {code}:\n{log.read()}"


def newest_manifest(uri: str, endpoint_url: str | None = None) -> Manifest:
    storage = open_storage(uri, endpoint_url=endpoint_url)
    head = read_head(storage)
    assert head is not None
    assert head.newest is not None
    return read_manifest(storage, head.newest)


def test_fsdp_saved_by_4_ranks_loads_bit_for_bit_at_any_world_size(tmp_path: Path) -> None:
    uri = f"file://{tmp_path}/store"
    run_ranks("save", 4, 1, uri, tmp_path / "ranks")
    for generation, world_size in enumerate((1, 2, 3, 4), start=2):
        run_ranks("load", world_size, generation, uri, tmp_path / "ranks", TEST_SAVED_BY="4")


def test_fsdp_on_s3_from_2_ranks_to_3(
    tmp_path: Path,
    s3_store,
    s3_credentials: None,  # type: ignore[no-untyped-def]
) -> None:
    uri = f"s3://{s3_store.new_bucket()}/job"
    run_ranks("save", 2, 1, uri, tmp_path / "ranks", TEST_ENDPOINT=s3_store.endpoint_url)
    run_ranks("load", 3, 2, uri, tmp_path / "ranks", TEST_SAVED_BY="2", TEST_ENDPOINT=s3_store.endpoint_url)


def test_ddp_writes_every_byte_once_spread_over_the_ranks(tmp_path: Path) -> None:
    uri = f"file://{tmp_path}/store"
    run_ranks("save_ddp", 3, 1, uri, tmp_path / "ranks")
    manifest = newest_manifest(uri)
    assert all(len(tensor.chunks) == 1 for tensor in manifest.tensors.values())
    assert all(file.size > 0 for file in manifest.files)
    run_ranks("load_ddp", 2, 2, uri, tmp_path / "ranks", TEST_SAVED_BY="3")


def test_each_shard_damaged_in_turn_is_noticed_and_the_commit_before_is_found(tmp_path: Path) -> None:
    uri = f"file://{tmp_path}/store"
    run_ranks("save", 3, 1, uri, tmp_path / "ranks")
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


def test_ranks_agree_on_what_becomes_of_a_save(tmp_path: Path) -> None:
    run_ranks("agreement", 2, 1, f"file://{tmp_path}/store", tmp_path / "ranks")
