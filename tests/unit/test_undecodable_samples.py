"""Samples of shards that can't be decoded: which ones stand in, and how many there may be."""

from __future__ import annotations

import logging
import multiprocessing
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
import torch

from spottrain.data import Shards
from spottrain.data.batch import BatchPlan
from spottrain.data.loader import Data
from spottrain.data.rank_data import RankData
from spottrain.data.shards.formats import JsonLines
from spottrain.data.shards.make_index import make_index
from spottrain.data.shards.store import ShardPlace

# Of three shards of five samples: the last one of the first shard, and two in a row in the second.
BAD = {4, 7, 8}
STAND_INS = {4: 0, 7: 9, 8: 9}
READ = [STAND_INS.get(number, number) for number in range(15)]


def decode(value: Any) -> torch.Tensor:
    if value in BAD:
        raise LookupError(value)
    return torch.tensor(value)


def shards_in(tmp_path: Path, *, cache: str = "cache", decode: Any = decode, **how: Any) -> Shards:
    uri = f"file://{tmp_path}/*.jsonl"
    for shard in range(3):
        lines = "".join(f"{5 * shard + line}\n" for line in range(5))
        (tmp_path / f"{shard}.jsonl").write_text(lines)
    make_index(ShardPlace.of(uri), JsonLines())
    return Shards(uri, format=JsonLines(decode=decode), cache=tmp_path / cache, cache_bytes=1000, **how)


def test_the_next_sample_of_the_shard_stands_in_and_is_counted_once(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    data = shards_in(tmp_path, max_undecodable=3)
    with caplog.at_level(logging.WARNING):
        for _ in range(2):
            assert [data[index].item() for index in range(15)] == READ
    assert len(data.undecodable) == 3
    assert len(caplog.messages) == 3
    assert caplog.messages[0].startswith("The next sample stands in: sample 4 of the shard 0.jsonl of file://")
    assert caplog.messages[-1].endswith("Left out: 3 of 3.")


@pytest.mark.parametrize("num_workers", [0, 2])
def test_the_same_samples_stand_in_at_any_number_of_ranks_and_workers(tmp_path: Path, num_workers: int) -> None:
    read = {}
    for world_size in (1, 2, 3):
        data = shards_in(tmp_path, cache=f"cache {world_size}", max_undecodable=3, window=1)
        order = data.order(seed=3, shuffle=True, global_batch=3)
        found: dict[int, int] = {}
        for rank in range(world_size):
            rank_data = RankData(
                data=Data(data, num_workers=num_workers),
                order=order,
                plan=BatchPlan(global_batch=3, micro_batch=1, world_size=world_size),
                rank=rank,
                generation=1,
                attempt="a",
                local_world_size=world_size,
            )
            rank_data.begin(5, by_epoch=False)
            with closing(rank_data.load(first_step=0, device=torch.device("cpu"))) as batches:
                for batch in batches:
                    found |= {batch.micro_batch.positions.start: int(batch.data)}
            assert rank_data.facts(5)["undecodable_samples"] == len(data.undecodable)
        assert len(data.undecodable) == 3
        assert [found[position] for position in range(15)] == [READ[each] for each in order.samples(range(15))]
        read[world_size] = found
    assert read[1] == read[2] == read[3]


def test_without_a_limit_and_beyond_it_the_run_ends_each_time(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"sample 4 of the shard 0\.jsonl of .* can't be decoded: LookupError\(4\)$"):
        shards_in(tmp_path)[4]
    data = shards_in(tmp_path, max_undecodable=2)
    assert [data[4].item(), data[8].item()] == [0, 9]
    for again in (data, shards_in(tmp_path, max_undecodable=2)):
        with pytest.raises(ValueError, match=r"sample 2 of the shard 1.* left out 2 samples already, .* raise it"):
            again[7]
    assert shards_in(tmp_path, max_undecodable=3)[7].item() == 9
    with pytest.raises(ValueError, match="max_undecodable at least 0"):
        shards_in(tmp_path, max_undecodable=-1)


def test_a_shard_without_any_good_sample_is_named(tmp_path: Path) -> None:
    data = shards_in(tmp_path, max_undecodable=100, decode=lambda value: {}[value])
    with pytest.raises(ValueError, match=r"no sample of the shard 1\.jsonl of .* can be decoded"):
        data[6]


@pytest.mark.parametrize("error", [OSError(5, "Input/output error"), MemoryError()], ids=["disk", "memory"])
def test_what_fails_on_the_machine_says_nothing_about_a_sample(tmp_path: Path, error: Exception) -> None:
    def fail(value: Any) -> Any:
        raise error

    data = shards_in(tmp_path, max_undecodable=100, decode=fail)
    with pytest.raises(type(error)):
        data[0]
    assert len(data.undecodable) == 0


def leave_out(data: Shards, begin: Any) -> None:
    begin.wait()
    for index in range(15):
        data[index]


def test_processes_of_a_node_count_together(tmp_path: Path) -> None:
    data, context = shards_in(tmp_path, max_undecodable=3), multiprocessing.get_context("fork")
    begin = context.Event()
    processes = [context.Process(target=leave_out, args=(data, begin)) for _ in range(3)]
    try:
        for process in processes:
            process.start()
        begin.set()
        for process in processes:
            process.join()
        assert [process.exitcode for process in processes] == [0, 0, 0]
    finally:
        for process in processes:
            process.kill()
    assert len(data.undecodable) == 3
