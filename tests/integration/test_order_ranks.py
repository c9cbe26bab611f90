"""Ranks on gloo that read in the script's own order, and epoch by epoch."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

import script_orders
from shard_corpus import corpus, write_corpus
from spottrain.data import Mixture, Streams
from spottrain.data.audit import read_audit
from spottrain.data.batches import Batches
from spottrain.data.order import DataOrder, Permutation
from spottrain.data.script_order import ScriptOrder
from spottrain.data.shards.formats import JsonLines
from spottrain.data.shards.make_index import make_index
from spottrain.data.shards.store import ShardPlace
from spottrain.data.streams.stream_order import StreamOrder
from spottrain_api.contract.reports import FailureReason
from trainer_runs import STEPS, Run, assert_drained, assert_succeeded

EPOCHS = 3
GLOBAL_BATCH = 10


def order_of(name: str | None) -> DataOrder:
    if name is None:
        return Permutation(num_samples=script_orders.NUM_SAMPLES, seed=5)
    function = getattr(script_orders, name)
    return ScriptOrder(function, num_samples=script_orders.NUM_SAMPLES, seed=5, largest_batch=GLOBAL_BATCH)


@pytest.mark.parametrize("name", [None, "weighted", "packed"])
def test_epochs_in_any_order_are_those_of_one_rank_at_any_world_size(
    name: str | None, tmp_path: Path, fork: Any
) -> None:
    settings = {"epochs": EPOCHS, "order": name, "step_loss": True}
    steady = Run(tmp_path / "steady", fork, settings=settings)
    steady.generate(1)
    assert_succeeded(steady)

    resized = Run(tmp_path / "resized", fork, settings=settings)
    for world_size, faults in ((2, {1: {2: "drain"}}), (3, {0: {7: "drain"}}), (1, {})):
        resized.generate(world_size, faults)
        if faults:
            assert_drained(resized)
    assert_succeeded(resized)
    losses = resized.step_losses()

    for each, value in resized.parameters().items():
        torch.testing.assert_close(value, steady.parameters()[each], rtol=1e-4, atol=1e-5)
    assert losses == pytest.approx({step: steady.step_losses()[step] for step in losses}, rel=1e-3)
    batches = Batches(order_of(name), GLOBAL_BATCH, by_epoch=True, length=EPOCHS)
    total = len(list(batches.steps_from(0)))
    audit = read_audit(resized.folder / "audit")
    assert audit.problems(total, order=order_of(name)) == []
    assert len(audit.steps) == total
    assert {step.world for step in audit.steps} == {1, 2, 3}
    assert audit.num_redone == 0


def test_an_order_that_differs_by_rank_ends_the_run_with_a_sentence_before_its_steps_are_committed(
    tmp_path: Path, fork: Any
) -> None:
    run = Run(tmp_path, fork, settings={"epochs": EPOCHS, "order": "by_rank"}, interval="1steps")
    run.generate(2)
    for outcome in run.outcomes:
        assert outcome is not None
        assert outcome.failure is not None
        assert outcome.failure.reason is FailureReason.INVALID_CONFIGURATION
        assert outcome.failure.message.startswith("The order of the samples is not the same on all ranks.")
    head = run.head()
    assert head is not None
    assert head.newest is not None
    assert head.newest.step <= 5


@pytest.mark.parametrize("epochs", [None, 3], ids=["steps", "epochs"])
def test_shards_are_read_in_one_order_by_any_number_of_ranks_from_caches_that_hold_a_part(
    epochs: int | None, tmp_path: Path, fork: Any
) -> None:
    uri = write_corpus(tmp_path / "corpus", script_orders.NUM_SAMPLES, width=8)
    sizes = [path.stat().st_size for path in (tmp_path / "corpus").glob("*.jsonl")]
    settings = {"shards": uri, "cache_bytes": 10 * max(sizes), "epochs": epochs, "step_loss": True}
    steady = Run(tmp_path / "steady", fork, settings=settings)
    steady.generate(1)
    assert_succeeded(steady)

    resized = Run(tmp_path / "resized", fork, settings=settings)
    resized.generate(2, {1: {2: "drain"}})
    assert_drained(resized)
    resized.generate(3, {2: {7: "kill"}})
    resized.generate(3, {0: {9: "drain"}})
    assert_drained(resized)
    resized.generate(1)
    assert_succeeded(resized)

    losses = resized.step_losses()
    assert losses == pytest.approx({step: steady.step_losses()[step] for step in losses}, rel=1e-3)
    data = corpus(uri, tmp_path / "cache", max(sizes))
    audit = read_audit(resized.folder / "audit")
    order = data.order(seed=5, shuffle=True, global_batch=GLOBAL_BATCH)
    assert audit.problems(STEPS if epochs is None else 15, order=order) == []
    assert {step.world for step in audit.steps} == {1, 2, 3}
    for cache in resized.folder.glob("result.pt-cache-*"):
        assert sum(path.stat().st_size for path in cache.rglob("*.shard")) <= 10 * max(sizes)


def test_streams_are_read_in_one_order_by_any_number_of_ranks(tmp_path: Path, fork: Any) -> None:
    settings = {"streams": 4, "step_loss": True}
    steady = Run(tmp_path / "steady", fork, settings=settings)
    steady.generate(1)
    assert_succeeded(steady)

    resized = Run(tmp_path / "resized", fork, settings=settings)
    resized.generate(2, {1: {2: "drain"}})
    assert_drained(resized)
    resized.generate(3, {2: {7: "kill"}})
    resized.generate(1)
    assert_succeeded(resized)

    losses = resized.step_losses()
    assert losses == pytest.approx({step: steady.step_losses()[step] for step in losses}, rel=1e-3)
    for each, value in resized.parameters().items():
        torch.testing.assert_close(value, steady.parameters()[each], rtol=1e-4, atol=1e-5)
    order = StreamOrder(streams=4, seed=5, shuffle=True, global_batch=GLOBAL_BATCH, window=1)
    assert read_audit(resized.folder / "audit").problems(STEPS, order=order) == []


def test_a_mixture_is_read_in_one_order_whichever_of_its_processes_is_killed(tmp_path: Path, fork: Any) -> None:
    uri = write_corpus(tmp_path / "corpus", script_orders.NUM_SAMPLES, width=8)
    settings = {"shards": uri, "cache_bytes": 1 << 20, "streams": 4, "num_workers": 1, "step_loss": True}
    steady = Run(tmp_path / "steady", fork, settings=settings)
    steady.generate(1)
    assert_succeeded(steady)

    resized = Run(tmp_path / "resized", fork, settings=settings)
    resized.generate(2, {1: {1: "vanish fetch-ahead", 3: "drain"}})
    assert_drained(resized)
    resized.generate(3, {2: {6: "kill"}})
    resized.generate(2, {0: {8: "kill worker"}})
    assert resized.outcomes[0] is not None
    assert resized.outcomes[0].failure is not None
    assert resized.outcomes[0].failure.message.startswith("DataLoader worker")
    resized.generate(1)
    assert_succeeded(resized)

    losses = resized.step_losses()
    assert losses == pytest.approx({step: steady.step_losses()[step] for step in losses}, rel=1e-3)
    shards = corpus(uri, tmp_path / "cache", 1 << 20)
    data = Mixture({"shards": (shards, 2), "streams": (Streams(lambda *_: (), streams=4), 1)})
    order = data.order(seed=5, shuffle=True, global_batch=GLOBAL_BATCH)
    assert read_audit(resized.folder / "audit").problems(STEPS, order=order) == []


def test_a_corpus_that_has_changed_since_the_commit_is_refused(tmp_path: Path, fork: Any) -> None:
    uri = write_corpus(tmp_path / "corpus", script_orders.NUM_SAMPLES, width=8)
    run = Run(tmp_path / "run", fork, settings={"shards": uri, "cache_bytes": 1 << 20})
    run.generate(1, {0: {2: "drain"}})
    assert_drained(run)
    shard = tmp_path / "corpus" / "05.jsonl"
    shard.write_text(shard.read_text().replace("0.1", "0.2"))
    make_index(ShardPlace.of(uri), JsonLines())

    run.generate(1)

    [outcome] = run.outcomes
    assert outcome is not None
    assert outcome.failure is not None
    assert outcome.failure.reason is FailureReason.CHECKPOINT_INCOMPATIBLE
    assert "was made with order shards " in outcome.failure.message
