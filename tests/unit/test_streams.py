"""Streams without an index are read in one order, by any number of ranks."""

from __future__ import annotations

import logging
import random
from collections import Counter
from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from spottrain.checkpoint.errors import UnsupportedState
from spottrain.checkpoint.format import codec
from spottrain.checkpoint.loading.loader import Loaded
from spottrain.data import Streams
from spottrain.data.audit import read_audit
from spottrain.data.batch import BatchPlan
from spottrain.data.loader import Data
from spottrain.data.streams import reader
from spottrain.data.streams.cursor import Mark, StreamCursor, StreamError
from spottrain.data.streams.stream_order import StreamOrder
from spottrain.recovery.by_rank import load_rank_parts, rank_states_of
from stream_worlds import (
    GLOBAL_BATCH,
    LAST,
    RESIZED,
    WithState,
    data_of,
    generate,
    length,
    mark_everywhere,
    parts_of,
    ranks_of,
    without_state,
)


@pytest.fixture
def marks_everywhere(monkeypatch: pytest.MonkeyPatch) -> None:
    mark_everywhere(monkeypatch)


@pytest.mark.usefixtures("marks_everywhere")
@pytest.mark.parametrize(
    ("make", "window", "num_workers"),
    [(without_state, 1, 0), (without_state, 5, 0), (WithState, 5, 0), (WithState, 5, 1)],
    ids=["plain", "shuffled", "with state", "by workers"],
)
def test_a_resized_run_uses_the_items_of_one_rank(make: Any, window: int, num_workers: int, tmp_path: Path) -> None:
    streams = Streams(make, streams=5, window=window)
    order = streams.order(seed=3, shuffle=True, global_batch=GLOBAL_BATCH)
    steady = generate(data_of(streams), order, [(1, LAST)], tmp_path / "steady")
    resized = generate(data_of(streams, num_workers=num_workers), order, RESIZED, tmp_path / "resized")

    assert resized == steady
    assert len(steady) == LAST
    audit = read_audit(tmp_path / "resized")
    assert audit.problems(LAST, order=order) == []
    assert [step.samples for step in audit.steps] == [step.samples for step in read_audit(tmp_path / "steady").steps]
    for stream in range(5):  # all items of a stream, pass after pass; of the last window only some
        of_stream = [item for step in steady for item in step if item[0] == stream]
        passes = [
            (stream, place // length(stream), place % length(stream)) for place in range(len(of_stream) + window)
        ]
        assert set(of_stream) <= set(passes)
        assert len(set(of_stream)) == len(of_stream)
        assert (of_stream == passes[: len(of_stream)]) == (window == 1)


@pytest.mark.usefixtures("marks_everywhere")
def test_a_stream_with_a_state_is_read_on_from_where_it_was(tmp_path: Path) -> None:
    streams = Streams(WithState, streams=4)
    order = streams.order(seed=3, shuffle=True, global_batch=GLOBAL_BATCH)
    WithState.num_read = 0
    generate(data_of(streams), order, [(4, step) for step in (5, 10, 15, LAST)], tmp_path)
    # A mark is taken before an item is read. So at each of three resumes, the last item of each stream is read again.
    assert WithState.num_read == LAST * GLOBAL_BATCH + 3 * 4


def test_a_rank_opens_only_the_streams_of_its_part(tmp_path: Path) -> None:
    opened: Counter[int] = Counter()

    def make(stream: int, number: int) -> Iterator[int]:
        opened[stream] += 1
        return iter(range(10_000))

    streams = Streams(make, streams=6)
    order = streams.order(seed=3, shuffle=True, global_batch=GLOBAL_BATCH)
    generate(data_of(streams), order, [(6, LAST)], tmp_path)
    assert opened == dict.fromkeys(range(6), 1)
    generate(data_of(streams), order, [(4, LAST)], tmp_path / "4")  # 12 items of 6 streams for 4 ranks: 3 each
    assert opened == {0: 2, 1: 3, 2: 2, 3: 2, 4: 3, 5: 2}


@given(
    streams=st.integers(1, 8),
    more=st.integers(0, 9),
    window=st.integers(1, 4),
    positions=st.lists(st.integers(0, 500), max_size=20),
)
def test_an_item_depends_on_its_position_alone_and_is_used_once(
    streams: int, more: int, window: int, positions: list[int]
) -> None:
    order = StreamOrder(streams=streams, seed=2, shuffle=True, global_batch=streams + more, window=window)
    assert order.samples(positions).tolist() == [order.samples([each]).item() for each in positions]
    every = order.samples(range(12 * order.global_batch)).tolist()
    assert len(set(every)) == len(every)
    for step in (0, 3, 8):
        later = order.samples(range(step * order.global_batch, 12 * order.global_batch))
        for stream in range(streams):
            places = later[later % streams == stream] // streams
            assert places.min() >= order.oldest(stream, step) > places.min() - window


def test_the_order_never_changes_between_versions() -> None:
    order = StreamOrder(streams=3, seed=7, shuffle=True, global_batch=4, window=2)
    assert order.samples(range(12)).tolist() == ORDER_OF_3_STREAMS_WITH_SEED_7


ORDER_OF_3_STREAMS_WITH_SEED_7 = [3, 4, 2, 5, 0, 1, 11, 8, 6, 10, 17, 14]


def test_random_numbers_of_an_item_do_not_depend_on_the_ranks(tmp_path: Path) -> None:
    def make(stream: int, number: int) -> Iterator[float]:
        begin = torch.rand(1).item()
        while True:
            yield begin + random.random()

    streams = Streams(make, streams=4)
    order = streams.order(seed=3, shuffle=True, global_batch=GLOBAL_BATCH)
    steady = generate(data_of(streams), order, [(1, LAST)], tmp_path / "steady")
    assert generate(data_of(streams), order, RESIZED, tmp_path / "resized") == steady
    assert len({item for step in steady for item in step}) == LAST * GLOBAL_BATCH


class Clock:
    """A clock that goes on by a second at each look."""

    def __init__(self) -> None:
        self._seconds = 0

    def __call__(self) -> float:
        self._seconds += 1
        return float(self._seconds)


def test_a_long_skip_is_said_with_its_time_and_what_avoids_it(
    caplog: pytest.LogCaptureFixture, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(reader, "_SAID_SECONDS", 0.0)
    streams = Streams(without_state, streams=3)
    order = streams.order(seed=3, shuffle=True, global_batch=GLOBAL_BATCH)
    with caplog.at_level(logging.WARNING):
        generate(data_of(streams), order, [(1, 5), (1, 6)], tmp_path)
    # Streams have passes of 3, 8 and 13 items, of which each has used 20.
    [said] = [record.getMessage() for record in caplog.records]
    assert said.startswith(
        "To go on after step 5, 13 items of 3 streams were read and skipped in 0.0 s. Streams with"
    )


def test_marks_are_taken_seldom_if_they_take_time() -> None:
    class Slow(WithState):
        def state_dict(self) -> dict[str, Any]:
            clock.seconds += 10.0
            return super().state_dict()

    class Counting:
        seconds = 0.0

        def __call__(self) -> float:
            self.seconds += 0.25
            return self.seconds

    clock = Counting()
    found = StreamCursor(Slow, 200, Mark(), name="stream 200", seed=lambda place: None, now=clock)
    for place in range(1000):
        found.item(place, oldest=place)
    marks = found.pop_marks()
    assert marks[0] == Mark()
    assert [mark.place for mark in marks[1:3]] == [3, 823]  # 820 items of 0.25 s: 20 times as long as the mark took
    assert found.pop_marks() == []


def open_at(make: Any, mark: Mark = Mark()) -> StreamCursor:  # noqa: B008
    return StreamCursor(make, 2, mark, name="stream 2", seed=lambda place: None, now=Clock())


class Forgets(WithState):
    def load_state_dict(self, state: dict[str, Any]) -> None:
        raise KeyError("shard")


@pytest.mark.parametrize(
    ("make", "mark", "sentence"),
    [
        (lambda stream, number: iter([]), Mark(), "stream 2 has no items in its pass 1"),
        (lambda stream, number: 7, Mark(), "make_stream returns a int for stream 2, which has no items"),
        (without_state, Mark(9, 0, "{}"), r"stream 2 had a state at item 9 \(pass 0\), and .* no load_state_dict"),
        (Forgets, Mark(9, 0, "{}"), r"which its load_state_dict does not take: KeyError\('shard'\)"),
    ],
    ids=["empty", "no iterable", "state lost", "state refused"],
)
def test_a_stream_that_cannot_be_read_is_named(make: Any, mark: Mark, sentence: str) -> None:
    with pytest.raises(StreamError, match=sentence):
        open_at(make, mark).item(mark.place, oldest=0)


@pytest.mark.usefixtures("marks_everywhere")
def test_a_state_that_no_commit_can_hold_is_refused_at_the_first_item() -> None:
    class Odd(WithState):
        def state_dict(self) -> dict[str, Any]:
            return {"file": open}

    with pytest.raises(UnsupportedState, match="'file'"):
        open_at(Odd).item(0, oldest=0)


@pytest.mark.parametrize(
    ("make", "how", "sentence"),
    [
        ([1, 2], {}, r"make_stream \(list\) is not a function"),
        (without_state, {"streams": 0}, "at least 1"),
        (without_state, {"window": 0}, "at least 1"),
        (without_state, {"streams": 13}, "13 streams, and batch.global is 12"),
    ],
)
def test_arguments_that_make_no_streams_are_refused(make: Any, how: dict[str, Any], sentence: str) -> None:
    with pytest.raises(ValueError, match=sentence):
        Streams(make, **{"streams": 2, **how}).order(seed=0, shuffle=True, global_batch=GLOBAL_BATCH)


def test_several_workers_and_epochs_are_refused(tmp_path: Path) -> None:
    streams = Streams(without_state, streams=2)
    with pytest.raises(ValueError, match="one process reads a rank's streams"):
        Data(streams, num_workers=2).check()
    order = streams.order(seed=0, shuffle=True, global_batch=GLOBAL_BATCH)
    [rank] = ranks_of(data_of(streams), order, 1, tmp_path, 1)
    with pytest.raises(ValueError, match=r"the data \(2 streams, window 1\) have no epochs.* training.epochs"):
        rank.begin(3, by_epoch=True)
    rank.schedule_interval = "epoch"
    with pytest.raises(ValueError, match="scheduler_interval"):
        rank.begin(3, by_epoch=False)


def test_a_rank_without_samples_left_reads_its_own_streams() -> None:
    plan = BatchPlan(global_batch=10, micro_batch=1, world_size=4)
    for rank in range(4):
        batch = range(10, 20)
        assert all(set(each.positions) <= set(plan.share(rank, batch)) for each in plan.micro_batches(rank, batch))


def test_items_are_fetched_in_a_worker_that_goes_on_where_the_rank_has_stopped(tmp_path: Path) -> None:
    """By default, slow items are read by the rank first, and then by a worker."""
    import os
    import time

    def make(stream: int, number: int) -> Iterator[tuple[int, int, int]]:
        for item in range(1000):
            time.sleep(0.002)
            yield stream, item, os.getpid()

    streams = Streams(make, streams=3)
    order = streams.order(seed=3, shuffle=True, global_batch=GLOBAL_BATCH)
    steps = generate(data_of(streams, num_workers=None), order, [(1, 6)], tmp_path)
    assert len({item[2] for step in steps for item in step}) == 2
    for stream in range(3):
        places = [item[1] for step in steps for item in step if item[0] == stream]
        assert places == list(islice(range(1000), len(places)))


def test_marks_of_all_ranks_are_restored_at_the_same_number_of_ranks_too(tmp_path: Path) -> None:
    """The streams of a rank may be others then: `batch.multipleOf` may have changed."""
    order = StreamOrder(streams=4, seed=0, shuffle=True, global_batch=GLOBAL_BATCH, window=1)
    ranks = ranks_of(data_of(Streams(without_state, streams=4)), order, 2, tmp_path, 1)
    for rank in ranks:
        assert rank.marks is not None
        rank.marks.add({stream: [Mark(), Mark(3 * stream, 1)] for stream in rank.marks.own})
        rank.marks.completed(5)
    states = tuple(codec.encode({"parts": rank_states_of(parts_of(rank))}) for rank in ranks)
    again = ranks_of(data_of(Streams(without_state, streams=4)), order, 2, tmp_path, 2)[0]
    saved = Loaded(step=5, state={}, extra={}, rank_state=codec.decode(states[0]), rank_states=states)
    load_rank_parts(parts_of(again), saved)
    assert again.marks is not None
    assert again.marks.newest() == {stream: Mark(3 * stream, 1) for stream in range(4)}
