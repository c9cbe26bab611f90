"""Ranks without samples: fewer samples of a batch, shards, streams or samples at all than ranks."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from shard_folders import shards_in
from spottrain.data import Mixture, Streams
from spottrain.data.audit import read_audit
from spottrain.data.batch import BatchPlan
from spottrain.data.batches import Batches
from spottrain.data.order import DataOrder, Permutation
from spottrain.data.streams.cursor import StreamError
from stream_worlds import GLOBAL_BATCH, LAST, WithState, data_of, generate, mark_everywhere, without_state

MORE_RANKS_THAN_SAMPLES = ((GLOBAL_BATCH + 1, 5), (2, 12), (GLOBAL_BATCH + 3, LAST))


def order_of(dataset: Any) -> DataOrder:
    found: DataOrder = dataset.order(seed=3, shuffle=True, global_batch=GLOBAL_BATCH)
    return found


@pytest.mark.parametrize("kind", ["streams", "streams with a state", "mixture", "shards", "list"])
def test_a_batch_smaller_than_the_world_gives_each_sample_once(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    mark_everywhere(monkeypatch)
    three = [("list", item) for item in range(3)]
    makers: dict[str, Callable[[], Any]] = {
        "streams": lambda: Streams(without_state, streams=3, window=2),
        "streams with a state": lambda: Streams(WithState, streams=3),
        "mixture": lambda: Mixture({"web": (Streams(WithState, streams=2), 1), "list": (three, 2)}),
        "shards": lambda: shards_in(tmp_path, cache_bytes=600),  # 6 shards for up to 15 ranks
        "list": lambda: three,
    }
    dataset = makers[kind]()
    order = Permutation(num_samples=3, seed=3) if kind == "list" else order_of(dataset)
    steady = generate(data_of(dataset), order, [(1, LAST)], tmp_path / "steady")
    resized = generate(data_of(dataset), order, MORE_RANKS_THAN_SAMPLES, tmp_path / "resized")
    assert resized == steady
    assert read_audit(tmp_path / "resized").problems(LAST, order=order) == []


def test_a_last_batch_of_one_sample_gives_all_but_one_rank_something_that_weighs_nothing() -> None:
    plan = BatchPlan(global_batch=12, micro_batch=2, world_size=5)
    batches = Batches(Permutation(num_samples=13), 12, by_epoch=True)
    found = [plan.micro_batches(rank, batches.at(1).positions) for rank in range(5)]
    assert {len(each) for each in found} == {plan.num_micro_batches}
    assert all(each.positions for parts in found for each in parts)
    assert sum(each.num_samples for parts in found for each in parts) == 1
    assert sum(each.loss_weight for parts in found for each in parts) == 5  # the mean over five ranks is 1


@pytest.mark.parametrize("make", [lambda stream, number: [], lambda stream, number: [1] * (1 - number)])
def test_a_stream_without_items_is_named(make: Any, tmp_path: Path) -> None:
    dataset = Streams(make, streams=2)
    with pytest.raises(StreamError, match=r"stream \d.*no items"):
        generate(data_of(dataset), order_of(dataset), [(1, LAST)], tmp_path)
