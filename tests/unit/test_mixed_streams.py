"""Streams as sources of a mixture: one order, and a commit with the place of each."""

from __future__ import annotations

import pickle
from collections import Counter
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from spottrain.data import Mixture, Streams
from spottrain.data.audit import read_audit
from spottrain.data.batch import BatchPlan
from spottrain.data.loader import Data
from spottrain.data.mixtures.mixture_order import MixtureOrder
from spottrain.data.mixtures.reader import MixtureReader
from spottrain.data.streams.cursor import StreamError
from spottrain.loop.acceptance import order_of
from stream_worlds import (
    GLOBAL_BATCH,
    LAST,
    RESIZED,
    WithState,
    data_of,
    generate,
    length,
    mark_everywhere,
    ranks_of,
    without_state,
)

LIST = [("list", item) for item in range(7)]


def order(data: Mixture) -> MixtureOrder:
    return data.order(seed=3, shuffle=True, global_batch=GLOBAL_BATCH)


@pytest.mark.parametrize("num_workers", [0, 1])
def test_a_resized_run_uses_the_samples_of_one_rank(
    num_workers: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    mark_everywhere(monkeypatch)
    data = Mixture(
        {
            "web": (Streams(WithState, streams=5, window=3), 5),
            "code": (Streams(without_state, streams=3), 3),
            "list": (LIST, 2),
        },
        changes={8: {"web": 1, "code": 0, "list": 1}, 14: {"web": 3, "code": 3, "list": 0}},
    )
    steady = generate(data_of(data), order(data), [(1, LAST)], tmp_path / "steady")
    resized = generate(data_of(data, num_workers=num_workers), order(data), RESIZED, tmp_path / "resized")
    assert resized == steady
    assert read_audit(tmp_path / "resized").problems(LAST, order=order(data)) == []


def test_a_stream_with_a_state_is_read_on_from_where_it_was(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    mark_everywhere(monkeypatch)
    data = Mixture({"web": (Streams(WithState, streams=6), 1), "list": (LIST, 1)})
    WithState.num_read = 0
    generate(data_of(data), order(data), [(2, step) for step in (5, 10, 15, LAST)], tmp_path)
    # Half of the samples. At each of three resumes, the last item of each stream is read again.
    assert WithState.num_read == LAST * GLOBAL_BATCH // 2 + 3 * 6


def test_a_rank_opens_only_the_streams_of_its_part(tmp_path: Path) -> None:
    opened: Counter[int] = Counter()

    def make(stream: int, number: int) -> Iterator[int]:
        opened[stream] += 1
        return iter(range(10_000))

    for weight in (1, 5, 11):  # of 12: fewer samples than streams, and more
        opened.clear()
        data = Mixture({"web": (Streams(make, streams=6), weight), "list": (LIST, 12 - weight)})
        generate(data_of(data), order(data), [(3, LAST)], tmp_path / str(weight))
        assert opened == dict.fromkeys(range(6), 1)


@settings(max_examples=30)
@given(
    weights=st.lists(st.integers(0, 9), min_size=3, max_size=3).filter(any),
    streams=st.integers(1, 14),
    begin=st.integers(0, 10_000),
)
def test_every_item_of_a_stream_is_used_once_and_each_source_has_its_share(
    weights: list[int], streams: int, begin: int
) -> None:
    data = Mixture(
        {
            "many": (Streams(without_state, streams=streams, window=2), weights[0]),
            "two": (Streams(without_state, streams=2), weights[1]),
            "list": (LIST, weights[2]),
        }
    )
    of_run = order(data)
    streamed = of_run.streams
    assert streamed is not None
    num_steps = 8
    samples = of_run.samples(range(begin * GLOBAL_BATCH, (begin + num_steps) * GLOBAL_BATCH))
    places, numbers = np.divmod(samples[samples >= len(LIST)] - len(LIST), streams + 2)
    assert len({*zip(places.tolist(), numbers.tolist(), strict=True)}) == len(places)
    for number, of_source in ((0, numbers < streams), (1, numbers >= streams)):
        assert abs(of_source.sum() - num_steps * GLOBAL_BATCH * weights[number] / sum(weights)) <= 6
    for stream in range(streams + 2):
        found = np.sort(places[numbers == stream])
        if len(found):
            first, last = (streamed.oldest(stream, step) for step in (begin, begin + num_steps))
            assert first <= found[0]
            assert found[-1] <= last + 4  # a window, and the turns of a step that is not complete
            assert (np.diff(found) <= (3 if stream < streams else 1)).all()  # the last window is used in part


def test_the_order_never_changes_between_versions() -> None:
    data = Mixture({"web": (Streams(without_state, streams=3, window=2), 2), "list": (LIST, 1)})
    assert order(data).samples(range(24)).tolist() == ORDER_OF_WEB_AND_LIST


ORDER_OF_WEB_AND_LIST = [7, 3, 10, 16, 11, 0, 8, 14, 1, 12, 4, 9, 13, 2, 19, 22, 6, 17, 5, 20, 18, 4, 15, 24]


def test_what_is_drawn_at_random_does_not_depend_on_the_ranks(tmp_path: Path) -> None:
    def make(stream: int, number: int) -> Iterator[float]:
        while True:
            yield np.random.random()

    data = Mixture({"web": (Streams(make, streams=4), 1), "code": (Streams(make, streams=4), 1)})
    steady = generate(data_of(data), order(data), [(1, LAST)], tmp_path / "steady")
    assert generate(data_of(data), order(data), RESIZED, tmp_path / "resized") == steady
    assert len({item for step in steady for item in step}) == LAST * GLOBAL_BATCH


def test_a_stream_that_cannot_be_read_is_named_with_its_source(tmp_path: Path) -> None:
    data = Mixture({"list": (LIST, 1), "web": (Streams(lambda stream, number: iter(()), streams=2), 1)})
    with pytest.raises(StreamError, match="stream 0 of web has no items in its pass 1"):
        generate(data_of(data), order(data), [(1, 1)], tmp_path)


@pytest.mark.parametrize("num_workers", [0, 1])
def test_items_of_different_shapes_are_named(num_workers: int, tmp_path: Path) -> None:
    class Shaped(list[Any]):
        def __getitem__(self, index: Any) -> Any:
            return torch.zeros(3 if index != 2 else 4)

    alone, odd = Shaped(range(GLOBAL_BATCH)), "sample 0 and sample 2"
    streams = Streams(lambda stream, number: (torch.zeros(1 + stream) for _ in range(9)), streams=2)
    mixed = Mixture({"long": (streams, 1), "short": ([torch.zeros(1)], 1)})
    for data, named in (
        (alone, odd),
        (streams, "item 0 of stream 0 and item 0 of stream 1"),
        (mixed, "item 0 of stream 1 of long and sample 0 of short"),
    ):
        how = Data(data, num_workers=num_workers, shuffle=False)
        ordered = order_of(how, 0, order=None, largest_batch=GLOBAL_BATCH)
        [rank] = ranks_of(how, ordered, 1, tmp_path, 1)
        rank.plan = BatchPlan(global_batch=GLOBAL_BATCH, micro_batch=GLOBAL_BATCH, world_size=1)
        rank.begin(1, by_epoch=False)
        sentence = rf"{named} can't be in one batch: stack expects .* pass collate"
        found = rank.load(first_step=0, device=torch.device("cpu"))
        with closing(found), pytest.raises(ValueError, match=sentence):
            next(found)


@pytest.mark.filterwarnings("ignore:Got pickle error")
def test_a_data_set_that_no_worker_can_unpickle_is_refused_with_what_to_do(tmp_path: Path) -> None:
    class Local(list[int]): ...

    how = Data(Local(range(24)), num_workers=1, loader={"multiprocessing_context": "spawn"})
    [rank] = ranks_of(how, order_of(how, 0, order=None, largest_batch=GLOBAL_BATCH), 1, tmp_path, 1)
    rank.begin(1, by_epoch=False)
    with (
        closing(rank.load(first_step=0, device=torch.device("cpu"))) as batches,
        pytest.raises(ValueError, match=r"can't be passed to a worker: .*Local.* Define it at the top of a module"),
    ):
        next(batches)


def test_streams_of_a_mixture_have_one_worker_at_most() -> None:
    with pytest.raises(ValueError, match="one process reads a rank's streams"):
        Data(Mixture({"web": (Streams(without_state, streams=2), 1)}), num_workers=2).check()


def test_a_worker_that_is_no_fork_can_read_a_mixture(tmp_path: Path) -> None:
    data = Mixture({"web": (Streams(WithState, streams=2), 1), "list": (LIST, 1)})
    [rank] = ranks_of(data_of(data), order(data), 1, tmp_path, 1)
    assert rank.marks is not None
    read = pickle.loads(pickle.dumps(MixtureReader(data, rank.marks, seed=3)))
    [micro_batch, *_] = rank.plan.micro_batches(0, range(GLOBAL_BATCH))
    samples = rank.order.samples(micro_batch.positions).tolist()
    assert read.items(micro_batch, samples) == [_item(data, sample) for sample in samples]
    assert set(read.pop_marks()) == {0, 1}


def _item(data: Mixture, sample: int) -> Any:
    if sample < len(data):
        return data[sample]
    place, stream = divmod(sample - len(data), 2)
    return stream, *divmod(place, length(stream))
