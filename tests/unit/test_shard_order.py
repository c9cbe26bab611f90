"""The order of samples in shards: properties of a pure function."""

from __future__ import annotations

import time
import tracemalloc
from itertools import islice

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


def test_a_resume_anywhere_in_a_trillion_tokens_is_fast_and_small() -> None:
    """10^5 shards of 5,000 samples of 2,048 tokens: about 10^12 tokens."""
    content = index_of([5000 + shard % 7 for shard in range(100_000)]).to_json()
    tracemalloc.start()
    started = time.process_time()
    index = ShardIndex.from_json(content, "here")
    order = ShardOrder(index, seed=3, shuffle=True, global_batch=1024, window=8, lanes=64)
    position = 7 * order.num_samples // 2 // 1024 * 1024
    samples = order.samples(range(position, position + 1024))
    upcoming = list(islice(order.upcoming(position, range(256), by_epoch=True), 200))
    seconds, (_, peak) = time.process_time() - started, tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert len(set(samples.tolist())) == 1024
    assert len(set(upcoming)) == 200
    assert index.num_samples * 2048 > 10**12
    assert peak < 200e6
    assert seconds < 5, "a loose bound: measured under tracemalloc, and on a busy machine"
