"""Stores that throttle, hang, cut or change what they send: the right bytes after a retry, or a sentence."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import closing, contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from faulty_proxy import FaultyProxy, faulty_proxy
from shard_folders import shards_in, web_server
from spottrain.checkpoint.errors import CheckpointError, StorageDenied, StorageUnavailable
from spottrain.checkpoint.stores.file_storage import FileStorage
from spottrain.checkpoint.stores.storage import ANSWER_SECONDS
from spottrain.data.batch import BatchPlan
from spottrain.data.batches import Batches
from spottrain.data.loader import Data, load_batches
from spottrain.data.order import Permutation
from spottrain.data.shards import read_shard, store
from spottrain.data.shards.cache import ShardCache
from spottrain.data.shards.dataset import read_index
from spottrain.data.shards.formats import JsonLines
from spottrain.data.shards.index import INDEX_KEY, UNKNOWN, InvalidIndex, ShardIndex
from spottrain.data.shards.make_index import verify
from spottrain.data.shards.store import ShardDamaged, ShardPlace, through_outages

PASSING = ["throttles", "limits", "cuts", "drops", "halves", "errs", "redirects"]


@contextmanager
def proxy_before(folder: Path) -> Iterator[tuple[ShardPlace, FaultyProxy]]:
    with web_server(folder) as address, faulty_proxy(address) as proxy:
        yield ShardPlace.of(f"{proxy.url}/corpus/*.jsonl"), proxy


def cache_of(place: ShardPlace, index: ShardIndex, folder: Path) -> ShardCache:
    """A cache that does not wait before it reads again."""
    return ShardCache(folder, 300, index, JsonLines(), place.open, place="corpus", sleep=lambda seconds: None)


def test_a_fault_that_passes_costs_time_alone(tmp_path: Path) -> None:
    data, slept = shards_in(tmp_path), list[float]()
    unknown = replace(data.index, checksums=np.full(6, UNKNOWN))
    shard = (tmp_path / "corpus" / "0.jsonl").read_bytes()
    with proxy_before(tmp_path) as (place, proxy):
        for fault in PASSING:
            proxy.play(fault, times=2, within=INDEX_KEY)
            assert read_index(place, JsonLines(), sleep=slept.append).fingerprint == data.index.fingerprint, fault
        assert slept == [1, 2] * (len(PASSING) - 1)  # a redirection is followed at once
        for fault in (*PASSING, "alters", "pads"):
            for index in (data.index, unknown)[: 1 + (fault != "alters")]:
                here = cache_of(place, index, tmp_path / f"{fault} {index is unknown}")
                proxy.play(fault, times=2, within=".jsonl")
                with open(here.open(0), "rb") as file:
                    assert file.read() == shard, fault


LASTING: dict[str, tuple[type[CheckpointError], str]] = {
    "throttles": (StorageUnavailable, "0.jsonl: the server answers 503 .* It was asked again for .* Mend the store"),
    "cuts": (StorageUnavailable, "0.jsonl: the answer broke off"),
    "hangs": (StorageUnavailable, "0.jsonl can't be read: .*timed out"),
    "denies": (StorageDenied, "0.jsonl: the server answers 403 .* Correct the address, or let the server send"),
    "turns around": (StorageDenied, "0.jsonl: the server answers 307 .* Correct the address"),
    "ignores ranges": (StorageDenied, "0.jsonl: the server sends the whole file .* serve the shards with range"),
    "halves": (ShardDamaged, "shard 0.jsonl of corpus has 50 bytes, and the index says 100: .* something between"),
    "alters": (ShardDamaged, "shard 0.jsonl of corpus has changed since the index .* something between"),
    "errs": (StorageUnavailable, "0.jsonl: the server answers 200 OK for a part of the file"),
}


def test_a_fault_that_lasts_becomes_a_sentence(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    data = shards_in(tmp_path)
    monkeypatch.setattr(store, "PAUSES", (0, 0))
    monkeypatch.setattr(read_shard, "_PART_BYTES", 60)  # each shard is read in two parts
    with proxy_before(tmp_path) as (place, proxy):
        for fault, (kind, sentence) in LASTING.items():
            monkeypatch.setattr(store, "ANSWER_SECONDS", 0.1 if fault == "hangs" else ANSWER_SECONDS)
            here = cache_of(place, data.index, tmp_path / fault)
            proxy.play(fault, within=".jsonl")
            with pytest.raises(kind, match=sentence) as caught:
                here.fetch(0)
            assert "\n" not in str(caught.value)
            assert not here.holds(0)
        proxy.play("errs", within=INDEX_KEY)
        with pytest.raises(InvalidIndex, match=r"Invalid JSON.*it has 28 bytes, and begins with b'<Error>Internal"):
            read_index(place, JsonLines(), sleep=lambda seconds: None)


def test_a_shard_without_a_checksum_is_checked_by_its_size_and_table(tmp_path: Path) -> None:
    data = shards_in(tmp_path)
    unknown = replace(data.index, checksums=np.full(6, UNKNOWN))
    place = ShardPlace.of(f"file://{tmp_path}/corpus/*.jsonl")
    here = cache_of(place, unknown, tmp_path / "other")
    shard = tmp_path / "corpus" / "3.jsonl"
    content = shard.read_bytes()
    for changed, sentence in (
        (content + b"\n", "3.jsonl of corpus has more than the 100 bytes of the index"),
        (b"\n" * 60 + content[60:], "3.jsonl of corpus can't be used: it has 2 samples, and the index says 5"),
    ):
        shard.write_bytes(changed)
        with pytest.raises(ShardDamaged, match=sentence):
            here.fetch(3)
        assert not here.holds(3)


def test_a_store_is_asked_for_five_minutes_also_if_each_try_takes_its_time() -> None:
    now = 0.0

    def hang() -> None:
        nonlocal now
        now += 100
        raise StorageUnavailable("It hangs.")

    with pytest.raises(StorageUnavailable, match=r"It hangs\. It was asked again for 400 s"):
        through_outages(hang, sleep=lambda seconds: None, clock=lambda: now)


def test_a_store_that_is_gone_for_a_while_is_asked_again(tmp_path: Path) -> None:
    data, slept = shards_in(tmp_path), list[float]()

    class Gone(FileStorage):
        def read_into(self, key: str, offset: int, memory: memoryview) -> int:
            if len(slept) < 4:
                raise StorageUnavailable("it is gone")
            return super().read_into(key, offset, memory)

    gone = partial(Gone, tmp_path / "corpus")
    cache = ShardCache(tmp_path / "cache", 300, data.index, JsonLines(), gone, place="corpus", sleep=slept.append)
    with pytest.raises(StorageUnavailable, match="it is gone"):
        cache.fetch(2, ahead=True)  # nobody waits for its lock
    assert slept == []
    cache.fetch(2)
    assert cache.holds(2)
    assert slept == [1, 2, 4, 8]


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        (lambda shard: shard.unlink(), "the shard 1.jsonl of {uri} is missing"),
        (lambda shard: shard.write_text("{}\n"), "the shard 1.jsonl of {uri} has 3 bytes, and the index says 100"),
        (
            lambda shard: shard.write_text("x" * 100),
            "the shard 1.jsonl of {uri} has changed since the index",
        ),
    ],
    ids=["missing", "cut", "changed"],
)
def test_a_shard_that_is_not_what_the_index_says_is_named(
    tmp_path: Path, change: Any, sentence: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    data = shards_in(tmp_path)
    monkeypatch.setattr(store, "_PAUSES_OF_DAMAGE", (0,))
    change(tmp_path / "corpus" / "1.jsonl")
    with pytest.raises(ShardDamaged, match=re.escape(sentence.format(uri=f"file://{tmp_path}/corpus/*.jsonl"))):
        data[5]
    assert not data.cache.holds(1)
    [found] = verify(ShardPlace.of(f"file://{tmp_path}/corpus/*.jsonl"), JsonLines())
    assert found.startswith("1.jsonl ")


@pytest.mark.parametrize("num_workers", [0, 1])
def test_a_damaged_shard_is_named_in_a_sentence_whoever_meets_it(
    tmp_path: Path, num_workers: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(store, "_PAUSES_OF_DAMAGE", (0,))
    data = shards_in(tmp_path)
    (tmp_path / "corpus" / "0.jsonl").unlink()
    batches = Batches(Permutation(num_samples=len(data), shuffle=False), 1)
    plan, how = BatchPlan(global_batch=1, micro_batch=1, world_size=1), Data(data, num_workers=num_workers)
    found = load_batches(how, batches, plan, rank=0, first_step=0, device=torch.device("cpu"))
    with closing(found), pytest.raises(ShardDamaged) as caught:
        next(found)
    assert str(caught.value).startswith(f"the shard 0.jsonl of file://{tmp_path}/corpus/*.jsonl is missing; put it")
    assert "\n" not in str(caught.value)
