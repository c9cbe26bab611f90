"""The order of samples in shards: properties of a pure function."""

from __future__ import annotations

import tracemalloc
from dataclasses import replace
from itertools import islice
from typing import Any

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from spottrain.data.shards.index import ShardIndex
from spottrain.data.shards.shard_order import ShardOrder


def index_of(samples: list[int]) -> ShardIndex:
    number = len(samples)
    return ShardIndex(
        format="tar",
        pattern="*.tar",
        names=tuple(f"{shard:06d}.tar" for shard in range(number)),
        sizes=np.full(number, 1 << 20),
        checksums=np.zeros(number, np.int64),
        samples=np.array(samples),
        unpacked=np.full(number, 1 << 20),
    )


@st.composite
def orders(draw: st.DrawFn) -> ShardOrder:
    samples = draw(st.lists(st.integers(0, 12), min_size=1, max_size=12).filter(any))
    return ShardOrder(
        index_of(samples),
        seed=draw(st.integers(0, 2**64)),
        shuffle=draw(st.booleans()),
        global_batch=draw(st.integers(1, 20)),
        window=draw(st.integers(1, 5)),
        lanes=draw(st.integers(1, 9)),
    )


@settings(max_examples=200)
@given(orders(), st.integers(0, 3))
def test_every_epoch_has_each_sample_exactly_once(order: ShardOrder, epoch: int) -> None:
    positions = range(epoch * order.num_samples, (epoch + 1) * order.num_samples)
    assert sorted(order.samples(positions).tolist()) == list(range(order.num_samples))
    assert order.epoch_at(positions[-1]).positions == positions


@given(orders(), st.lists(st.integers(0, 500), max_size=20))
def test_a_sample_depends_on_its_position_alone(order: ShardOrder, positions: list[int]) -> None:
    assert order.samples(positions).tolist() == [order.samples([each]).item() for each in positions]


def shards_of(order: ShardOrder, index: ShardIndex, positions: range) -> list[int]:
    return list(np.searchsorted(np.cumsum(index.samples), order.samples(positions), side="right").tolist())


@settings(max_examples=100)
@given(orders(), st.integers(0, 30), st.integers(1, 4), st.data())
def test_the_shards_that_come_next_are_known(
    order: ShardOrder, step: int, num_nodes: int, data: st.DataObject
) -> None:
    index = order._index
    size = order._global_batch
    node = data.draw(st.integers(0, num_nodes - 1))
    share = range(node * size // num_nodes, (node + 1) * size // num_nodes)
    if not share:
        return
    said = list(islice(order.upcoming(step * size, share, by_epoch=False), 4 * len(index.names)))
    for later in range(step, step + 3):
        if later * size + share.stop <= (step * size // order.num_samples + 2) * order.num_samples:
            needed = shards_of(order, index, range(later * size, (later + 1) * size)[share.start : share.stop])
            assert set(needed) <= set(said)


def test_a_node_reads_few_shards_at_once_and_all_nodes_together_each_shard_about_once() -> None:
    index = index_of([100] * 400)
    order = ShardOrder(index, seed=1, shuffle=True, global_batch=64, window=4, lanes=8)
    read: dict[int, set[int]] = {node: set() for node in range(4)}
    for step in range(order.num_samples // 64):
        for node in range(4):
            part = range(step * 64, (step + 1) * 64)[node * 16 : (node + 1) * 16]
            now = set(shards_of(order, index, part))
            assert len(now) <= order.side_by_side(range(node * 16, (node + 1) * 16)) == 10
            read[node] |= now
    assert sum(map(len, read.values())) <= 1.02 * 400


def test_neighbours_in_the_order_are_no_neighbours_in_a_shard() -> None:
    order = ShardOrder(index_of([100] * 40), seed=1, shuffle=True, global_batch=8, window=4, lanes=4)
    samples = order.samples(range(4000))
    assert np.count_nonzero(np.abs(np.diff(samples)) == 1) < 20
    other = ShardOrder(index_of([100] * 40), seed=2, shuffle=True, global_batch=8, window=4, lanes=4)
    assert np.count_nonzero(samples == other.samples(range(4000))) < 20
    assert np.count_nonzero(samples == order.samples(range(4000, 8000))) < 20


ORDER_OF_10_WITH_SEED_7 = [4, 8, 2, 9, 7, 5, 1, 0, 6, 3]


def test_the_order_never_changes_between_versions() -> None:
    order = ShardOrder(index_of([3, 3, 4]), seed=7, shuffle=True, global_batch=4, window=2, lanes=2)
    assert order.samples(range(10)).tolist() == ORDER_OF_10_WITH_SEED_7


class Counted(np.ndarray):
    """Entries of an index. It counts how many of them numpy reads."""

    read = 0

    def __array_ufunc__(self, ufunc: Any, method: str, *inputs: Any, **options: Any) -> Any:
        return self._plain(getattr(ufunc, method), inputs, options)

    def __array_function__(self, function: Any, types: Any, arguments: Any, options: Any) -> Any:
        return self._plain(function, arguments, options)

    def __getitem__(self, key: Any) -> Any:
        found = self.view(np.ndarray)[key]
        Counted.read += np.size(found)
        return found

    def _plain(self, function: Any, arguments: Any, options: Any) -> Any:
        Counted.read += sum(each.size for each in arguments if isinstance(each, Counted))
        plain = (each.view(np.ndarray) if isinstance(each, Counted) else each for each in arguments)
        return function(*plain, **options)


def counted(index: ShardIndex) -> ShardIndex:
    arrays = ("sizes", "checksums", "samples", "unpacked")
    return replace(index, **{name: getattr(index, name).view(Counted) for name in arrays})


NUM_SHARDS = 100_000
SIZE_OF_BATCH = 1024


def test_a_resume_anywhere_in_a_trillion_tokens_reads_each_entry_of_the_index_a_few_times() -> None:
    """10^5 shards of 5,000 samples of 2,048 tokens: about 10^12 tokens. What is read does not grow with samples."""
    content = index_of([5000 + shard % 7 for shard in range(NUM_SHARDS)]).to_json()
    assert len(content) < 50 * NUM_SHARDS
    tracemalloc.start()
    try:
        index = counted(ShardIndex.from_json(content, "here"))
        for share in (0.0, 0.31, 0.999999):
            Counted.read = 0
            order = ShardOrder(index, seed=3, shuffle=True, global_batch=SIZE_OF_BATCH, window=8, lanes=64)
            position = int((7 + share) * order.num_samples) // SIZE_OF_BATCH * SIZE_OF_BATCH
            samples = order.samples(range(position, position + SIZE_OF_BATCH))
            upcoming = list(islice(order.upcoming(position, range(256), by_epoch=True), 200))
            assert Counted.read < 6 * NUM_SHARDS
            Counted.read = 0
            order.samples(range(position + SIZE_OF_BATCH, position + 2 * SIZE_OF_BATCH))
            assert Counted.read <= 4 * SIZE_OF_BATCH, "the next batch reads what its samples need"
            assert len(set(samples.tolist())) == SIZE_OF_BATCH
            assert len(set(upcoming)) == 200
        assert order.num_samples * 2048 > 10**12
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak < 500 * NUM_SHARDS
