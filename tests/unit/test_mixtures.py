"""Mixtures of data sets: an order that is a pure function, and shares that follow the weights."""

from __future__ import annotations

import math
import multiprocessing
from collections import Counter
from contextlib import closing
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from cluster_fixtures import wait_for
from shard_corpus import write_corpus
from spottrain.data import Mixture, Shards
from spottrain.data.audit import read_audit
from spottrain.data.batch import BatchPlan
from spottrain.data.loader import Data
from spottrain.data.mixtures.apportionment import apportioned
from spottrain.data.mixtures.mixture_order import MixtureOrder
from spottrain.data.rank_data import RankData
from spottrain.data.shards.formats import JsonLines
from spottrain.loop.acceptance import order_of
from spottrain.world.failures import UserError
from stream_worlds import LAST, data_of, generate, ranks_of

BATCH = 12


def mixture(**weights: float) -> Mixture:
    sizes = {"web": 100, "code": 30, "books": 7}
    return Mixture(
        {name: ([(name, item) for item in range(sizes[name])], weight) for name, weight in weights.items()}
    )


def order(data: Mixture, *, seed: int = 5, shuffle: bool = True) -> MixtureOrder:
    return data.order(seed=seed, shuffle=shuffle, global_batch=BATCH)


@settings(max_examples=200)
@given(st.lists(st.floats(1e-6, 1.0), min_size=1, max_size=8), st.integers(0, 10**12), st.integers(1, 300))
def test_counts_grow_up_to_any_total_and_stay_close_to_the_shares(given: list[float], total: int, more: int) -> None:
    weights = np.array(given) / sum(given)
    counts = apportioned(total, weights)
    assert counts.sum() == total
    assert (apportioned(total + more, weights) >= counts).all()
    assert (np.abs(counts - total * weights) <= len(weights)).all()


@given(st.lists(st.integers(0, 9), min_size=1, max_size=5).filter(any), st.integers(0, 60))
def test_counts_are_those_of_one_sample_after_the_other(given: list[int], total: int) -> None:
    weights = np.array(given) / sum(given)
    counts = np.zeros(len(given), np.int64)
    for _ in range(total):
        counts[np.argmax(weights / (2 * counts + 1))] += 1
    assert apportioned(total, weights).tolist() == counts.tolist()


def names_of(data: Mixture, steps: range, **how: Any) -> Counter[str]:
    positions = range(steps.start * BATCH, steps.stop * BATCH)
    return Counter(data[index][0] for index in order(data, **how).samples(positions).tolist())


def test_each_source_has_its_share_and_its_own_epochs() -> None:
    data = mixture(web=6, code=3, books=1)
    assert names_of(data, range(100)) == {"web": 720, "code": 360, "books": 120}
    samples = [data[index] for index in order(data).samples(range(100 * BATCH)).tolist()]
    for name, size in (("web", 100), ("code", 30), ("books", 7)):
        of_source = [item for source, item in samples if source == name]
        for begin in range(0, len(of_source) - size, size):
            assert sorted(of_source[begin : begin + size]) == list(range(size))
        assert of_source[:size] != of_source[size : 2 * size]
    in_turn = [
        item
        for name, item in map(data.__getitem__, order(data, shuffle=False).samples(range(60)).tolist())
        if name == "books"
    ]
    assert in_turn == [0, 1, 2, 3, 4, 5]


def test_every_rank_has_a_like_share_of_each_source() -> None:
    data = mixture(web=2, code=1, books=1)
    for part in range(3):
        names = Counter(data[index][0] for index in order(data).samples(range(4 * part, 4 * part + 4)).tolist())
        assert names == {"web": 2, "code": 1, "books": 1}


def test_weights_change_after_the_steps_that_are_named() -> None:
    data = Mixture(
        {"web": ([("web", 0)], 1.0), "code": ([("code", 0)], 0.0)},
        changes={10: {"web": 1.0, "code": 3.0}, 20: {"web": 0, "code": 1}},
    )
    assert names_of(data, range(10)) == {"web": 120}
    assert names_of(data, range(10, 20)) == {"web": 30, "code": 90}
    assert names_of(data, range(20, 21)) == {"code": 12}


def test_a_sample_depends_on_its_position_alone_and_any_position_is_found_at_once() -> None:
    data = mixture(web=math.pi, code=math.e, books=1e-6)
    found = order(data).samples(range(1000))
    apart = [order(data).samples([position]).item() for position in range(0, 1000, 97)]
    assert found[::97].tolist() == apart
    far = order(data).samples(range(10**14, 10**14 + BATCH))
    assert ((far >= 0) & (far < len(data))).all()


def test_the_order_never_changes_between_versions() -> None:
    assert order(mixture(web=2, code=1)).samples(range(12)).tolist() == ORDER_OF_WEB_AND_CODE


ORDER_OF_WEB_AND_CODE = [62, 128, 6, 87, 110, 53, 46, 111, 69, 95, 107, 77]


def test_another_weight_or_source_is_another_run() -> None:
    kinds = {order(each).kind for each in (mixture(web=1, code=1), mixture(web=1, code=2), mixture(web=1, books=1))}
    assert len(kinds) == 3
    assert order(mixture(web=1, code=1)).kind == order(mixture(web=2, code=2)).kind
    epochs = {order(mixture(web=1, code=each)).epoch_at(0).fingerprint for each in (1, 2)}
    assert len(epochs) == 2


def test_shards_are_a_source_and_keep_their_order(tmp_path: Path) -> None:
    uri = write_corpus(tmp_path / "corpus", 46, width=2)
    shards = Shards(uri, format=JsonLines(), cache=tmp_path / "cache", cache_bytes=1 << 20, window=2, lanes=3)
    data = Mixture({"shards": (shards, 3), "list": ([{"y": index} for index in range(5)], 1)})
    samples = order(data).samples(range(20 * BATCH)).tolist()
    of_shards = [index for index in samples if index < 46]
    assert len(of_shards) == 180
    assert sorted(of_shards[:46]) == list(range(46))
    assert set(data[of_shards[0]]) == {"x", "y"}


def test_a_resized_run_uses_the_samples_of_one_rank(tmp_path: Path) -> None:
    uri = write_corpus(tmp_path / "corpus", 46, width=2)
    shards = Shards(uri, format=JsonLines(), cache=tmp_path / "cache", cache_bytes=1 << 20, window=2, lanes=3)
    data = Mixture({"shards": (shards, 3), "list": (list(range(5)), 1)}, changes={8: {"shards": 1, "list": 1}})
    steady = generate(data_of(data), order(data), [(1, LAST)], tmp_path / "steady")
    resized = generate(data_of(data), order(data), [(6, 5), (4, 11), (3, 12), (6, LAST)], tmp_path / "resized")
    assert resized == steady
    assert read_audit(tmp_path / "resized").problems(LAST, order=order(data)) == []


def test_shards_of_a_source_are_fetched_before_they_are_needed(tmp_path: Path) -> None:
    uri = write_corpus(tmp_path / "corpus", 46, width=2)
    shards = Shards(uri, format=JsonLines(), cache=tmp_path / "cache", cache_bytes=1 << 20, window=2, lanes=1)
    data = Mixture({"list": (list(range(5)), 1), "shards": (shards, 2)})
    of_shards = order(data)
    for step in (0, 3, 9):
        said = list(islice(of_shards.upcoming(1, step), 12))
        samples = of_shards.samples(range(step * BATCH, (step + 2) * BATCH)) - 5
        assert set(np.searchsorted(shards._ends, samples[samples >= 0], side="right").tolist()) <= set(said)

    [rank] = ranks_of(data_of(data), of_shards, 1, tmp_path / "audit", 1)
    rank.begin(LAST, by_epoch=False)
    with closing(rank.load(first_step=3, device=torch.device("cpu"))):
        wait_for(lambda: all(map(shards.cache.holds, said)), "the shards are here")
    assert not multiprocessing.active_children()


def test_a_rank_reports_epochs_and_what_its_node_fetched_too_late(tmp_path: Path) -> None:
    uri = write_corpus(tmp_path / "corpus", 46, width=2)
    shards = Shards(uri, format=JsonLines(), cache=tmp_path / "cache", cache_bytes=1 << 20, window=2, lanes=1)
    data = Mixture({"list": (list(range(5)), 1), "shards": (shards, 2)})
    [mixed] = ranks_of(data_of(data), order(data), 1, tmp_path / "audit", 1)
    assert mixed.facts(3) == {"epoch": None, "undecodable_samples": 0, "fetched_bytes": 0, "late_bytes": 0}
    shards.cache.fetch(11, ahead=True)
    _ = shards[0], shards[45], shards[0]
    late, ahead = int(shards.index.sizes[1]), int(shards.index.sizes[11])  # the first shard has no samples
    [alone] = ranks_of(Data(shards), shards.order(seed=5, shuffle=True, global_batch=BATCH), 1, tmp_path / "audit", 1)
    for rank in (mixed, alone):
        facts = rank.facts(6)
        assert (facts["fetched_bytes"], facts["late_bytes"]) == (late + ahead, late)
    assert alone.facts(6)["epoch"] == 1 + (6 * BATCH - 46) / 46
    assert alone.num_samples(6) == BATCH


def test_a_cache_that_is_too_small_for_a_source_is_refused(tmp_path: Path) -> None:
    uri = write_corpus(tmp_path / "corpus", 46, width=2)
    largest = max(path.stat().st_size for path in (tmp_path / "corpus").glob("*.jsonl"))
    shards = Shards(uri, format=JsonLines(), cache=tmp_path / "cache", cache_bytes=2 * largest, window=2, lanes=1)
    data = Mixture({"list": (list(range(5)), 1), "shards": (shards, 2)})
    [rank] = ranks_of(data_of(data), order(data), 1, tmp_path / "audit", 1)
    rank.begin(LAST, by_epoch=False)
    with pytest.raises(ValueError, match="raise cache_bytes to at least that, or lower window or lanes"):
        rank.load(first_step=0, device=torch.device("cpu"))


class Endless:
    def __iter__(self) -> Any:
        return iter(())


SAME = [1, 2, 3]


@pytest.mark.parametrize(
    ("sources", "changes", "sentence"),
    [
        ({}, {}, "Mixture has no sources"),
        ({"web": SAME}, {}, "the source web of Mixture is no pair"),
        ({"web": ([], 1)}, {}, "the source web of Mixture has no samples"),
        ({"web": (SAME, 1), "code": (SAME, 1)}, {}, "the sources web and code of Mixture are the same data set"),
        (
            {"web": (Endless(), 1)},
            {},
            "the source web of Mixture is a Endless; pass a data set with items by index, or Streams",
        ),
        ({"web": (Mixture({"a": (SAME, 1)}), 1)}, {}, "the source web of Mixture is a Mixture"),
        ({"web": (SAME, 0)}, {}, "the weights of Mixture sum to nothing"),
        ({"web": (SAME, math.nan)}, {}, "the weights of Mixture: web has the weight nan"),
        ({"web": (SAME, -1)}, {}, "web has the weight -1"),
        ({"web": (SAME, "1")}, {}, "web has the weight '1'"),
        (
            {"web": (SAME, 1)},
            {5: {"code": 1}},
            r"changes\[5\] of Mixture have to name each source once: web; look at code",
        ),
        ({"web": (SAME, 1)}, {5: {"web": 0}}, r"changes\[5\] of Mixture sum to nothing"),
        ({"web": (SAME, 1)}, {0: {"web": 1}}, "changes of Mixture has the step 0"),
    ],
)
def test_what_makes_no_mixture_is_refused(sources: Any, changes: Any, sentence: str) -> None:
    with pytest.raises(ValueError, match=sentence):
        Mixture(sources, changes=changes)


def test_an_order_of_the_script_and_epochs_are_refused() -> None:
    data = Data(mixture(web=1, code=1))
    with pytest.raises(UserError, match="order and a data set of Mixture were given"):
        order_of(data, 0, order=lambda epoch: [0], largest_batch=BATCH)
    rank = RankData(
        data=data,
        order=order_of(data, 0, order=None, largest_batch=BATCH),
        plan=BatchPlan(global_batch=BATCH, micro_batch=4, world_size=1),
        rank=0,
        generation=1,
        attempt="",
    )
    with pytest.raises(ValueError, match="have no epochs"):
        rank.begin(2, by_epoch=True)
    assert rank.begin(2, by_epoch=False)["order"].startswith("mixture ")
