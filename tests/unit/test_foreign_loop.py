"""The loop of another framework, on one rank."""

from __future__ import annotations

import importlib
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import spottrain
from shard_corpus import corpus, write_corpus
from spottrain.data import Mixture, Streams
from spottrain.loop.foreign_loop import ForeignLoop
from spottrain_api.contract.reports import Progress
from spottrain_api.settings.choices import StabilityAction
from spottrain_api.settings.stability import StabilityConfig

pytestmark = pytest.mark.usefixtures("world_of_its_own")


@pytest.fixture
def adapter(no_accelerator_afterwards: None) -> Any:
    """The adapter of Accelerate, whose import takes seconds in each process that collects tests."""
    return importlib.import_module("spottrain.adapters.accelerate")


def test_an_optimizer_without_state_rolls_back(tmp_path: Path) -> None:
    """torch steps such an optimizer to make its state, whenever that is read."""
    with spottrain.session(
        global_batch=1,
        micro_batch=1,
        checkpoint_uri=f"file://{tmp_path}",
        checkpoint_interval="2steps",
        stability=StabilityConfig(non_finite=StabilityAction.ROLLBACK),
    ) as session:
        model = nn.Linear(1, 1)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        loop = ForeignLoop(session.adopt(model, optimizer, dataset=[torch.ones(1)] * 8), total=6)
        optimizer.register_step_pre_hook(loop.before_update)
        for _, batch in loop.micro_batches():
            torch.autograd.backward(loop.weigh(model(batch).sum() * (math.nan if loop.step == 4 else 1.0)))
            optimizer.step()
            optimizer.zero_grad()
        progress = session._context.reporter.progress
    assert loop.step == 6
    assert progress.rollbacks == 1


def begin(total: Any) -> tuple[int, Progress]:
    """The total and the progress of a loop that has begun."""
    with spottrain.session(global_batch=1, micro_batch=1) as session:
        model = nn.Linear(1, 1)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        loop = ForeignLoop(session.adopt(model, optimizer, dataset=[torch.ones(1)] * 8), total)
        return loop.total, session._context.reporter.progress


@pytest.mark.parametrize("total", [None, 4])
def test_a_loop_by_epoch_has_exact_ends_or_that_of_its_total(total: int | None) -> None:
    with spottrain.session(global_batch=2, micro_batch=2) as session:
        model = nn.Linear(1, 1)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        loop = ForeignLoop(session.adopt(model, optimizer, dataset=[torch.ones(1)] * 5), total, epochs=2)
        optimizer.register_step_pre_hook(loop.before_update)
        found = []
        for epoch in loop.epochs():
            for batch in epoch:
                torch.autograd.backward(loop.weigh(model(batch).sum()))
                optimizer.step()
                found.append((epoch.number, len(batch)))
            found.append((epoch.number, loop.step))
    first = [(0, 2), (0, 2), (0, 1), (0, 3)]
    assert found == first + ([(1, 2), (1, 2), (1, 1), (1, 6)] if total is None else [(1, 2), (1, 4)])
    assert loop.total == (total or 6)


def test_a_loop_by_hand_has_any_number_of_losses_and_updates(capsys: pytest.CaptureFixture[str]) -> None:
    """No rank may stop between two updates of a step."""
    with spottrain.session(global_batch=2, micro_batch=1) as session:
        one, other = nn.Linear(1, 1), nn.Linear(1, 1)
        optimizers = [torch.optim.SGD(each.parameters(), lr=0.1) for each in (one, other)]
        training = session.adopt(
            nn.ModuleList([one, other]), optimizers, dataset=[torch.ones(1)] * 5, accumulates=False
        )
        loop = ForeignLoop(training, epochs=2, by_hand=True)
        sizes = []
        for epoch in loop.epochs():
            for batch in epoch:
                sizes.append(len(batch))
                for model, optimizer in zip((one, other), optimizers, strict=True):
                    torch.autograd.backward(loop.weigh(model(batch).sum()))
                    loop.before_update()
                    optimizer.step()
        assert loop.step == 6
    assert sizes == [2, 2, 1] * 2
    assert "changes weights" not in capsys.readouterr().err


@pytest.mark.parametrize("total", [6.0, np.int64(6), np.ceil(5.5), torch.tensor(6)])
def test_a_whole_number_of_any_type_is_a_total(total: Any) -> None:
    used, progress = begin(total)
    assert type(used) is int
    assert Progress.from_json(progress.to_json()).total_steps == used == 6


@pytest.mark.parametrize("total", [7.5, math.inf, math.nan, "6", torch.tensor([6, 7])])
def test_a_total_that_is_not_a_whole_number_is_refused(total: Any, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="1"):
        begin(total)
    assert (
        f"the total of steps is {total!r}, and a run ends after a whole number of them; pass a whole number. "
        "Epochs with exact ends are those of training.epochs"
    ) in capsys.readouterr().err


@pytest.mark.parametrize("with_optimizer", [True, False])
def test_a_schedule_of_accelerate_steps_once_an_optimizer_step(adapter: Any, with_optimizer: bool) -> None:
    with spottrain.session(global_batch=8, micro_batch=2) as session:
        accelerator = adapter.Accelerator(cpu=True, step_scheduler_with_optimizer=with_optimizer)
        model: Any = nn.Linear(1, 1)
        optimizer: Any = torch.optim.SGD(model.parameters(), lr=1.0)
        schedule: Any = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)
        model, optimizer, schedule = accelerator.prepare(model, optimizer, schedule)
        data = [torch.ones(1)] * 8
        loop = adapter.AcceleratedLoop(session, accelerator, model, optimizer, data, scheduler=schedule, total=2)
        for batch in loop.batches():
            with accelerator.accumulate(model):
                accelerator.backward(loop.weigh(model(batch).sum()))
                optimizer.step()
                schedule.step()
                optimizer.zero_grad()
    assert schedule.get_last_lr() == [0.25]


def read_by_accelerate(adapter: Any, data: Any, *, until: int, **how: Any) -> list[list[float]]:
    """The labels of each batch of a run of six steps, which is left after `until` of them."""
    found: list[list[float]] = []
    with spottrain.session(global_batch=4, micro_batch=4, seed=3, **how) as session:
        accelerator = adapter.Accelerator(cpu=True)
        model: Any = nn.Linear(2, 1)
        model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.0))
        loop = adapter.AcceleratedLoop(session, accelerator, model, optimizer, data, total=6)
        for inputs, labels in loop.batches():
            if loop.step == until:
                break
            with accelerator.accumulate(model):
                accelerator.backward(loop.weigh(model(inputs).sum()))
                optimizer.step()
                optimizer.zero_grad()
            found.append(labels.tolist())
    return found


@pytest.mark.parametrize("kind", ["shards", "streams", "mixture"])
def test_shards_streams_and_mixtures_are_read_by_accelerate_and_resume(
    adapter: Any, kind: str, tmp_path: Path
) -> None:
    in_shards = corpus(write_corpus(tmp_path / "corpus", 20, width=2), tmp_path / "cache", 1 << 20)
    streams = Streams(
        lambda stream, _: ((torch.ones(2), torch.tensor(10.0 * stream + i)) for i in range(9)), streams=2
    )
    data: Any = {
        "shards": in_shards,
        "streams": streams,
        "mixture": Mixture({"shards": (in_shards, 1), "streams": (streams, 1)}),
    }[kind]
    steady = read_by_accelerate(adapter, data, until=6)
    checkpoint = {"checkpoint_uri": f"file://{tmp_path}/checkpoints"}
    assert read_by_accelerate(adapter, data, until=3, **checkpoint) == steady[:3]
    assert read_by_accelerate(adapter, data, until=6, **checkpoint) == steady[3:]


def test_a_loop_that_is_left_without_an_update_of_the_step_commits_the_step_before(
    adapter: Any, tmp_path: Path
) -> None:
    """The optimizer has no state, so that torch steps it for the commit."""
    with spottrain.session(global_batch=2, micro_batch=2, checkpoint_uri=f"file://{tmp_path}") as session:
        accelerator = adapter.Accelerator(cpu=True)
        model: Any = nn.Linear(1, 1)
        model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
        loop = adapter.AcceleratedLoop(session, accelerator, model, optimizer, [torch.ones(1)] * 8, total=4)
        for batch in loop.batches():
            if loop.step == 2:
                break
            with accelerator.accumulate(model):
                accelerator.backward(loop.weigh(model(batch).sum()))
                optimizer.step()
                optimizer.zero_grad()
        reporter = session._context.reporter
    assert reporter.progress.commit is not None
    assert reporter.progress.commit.step == 2


@pytest.mark.parametrize("left_at", [0, 1], ids=["first of two", "last of two"])
def test_a_validation_that_is_left_early_ends_no_step_of_accelerate(adapter: Any, left_at: int) -> None:
    with spottrain.session(global_batch=8, micro_batch=2) as session:
        accelerator = adapter.Accelerator(cpu=True)
        model: Any = nn.Linear(1, 1)
        rows = torch.utils.data.DataLoader([torch.ones(1)] * 8, batch_size=4)  # type: ignore[arg-type, var-annotated]
        model, optimizer, validation = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1), rows)
        loop = adapter.AcceleratedLoop(session, accelerator, model, optimizer, [torch.ones(1)] * 8, total=3)
        for batch in loop.batches():
            with accelerator.accumulate(model):
                accelerator.backward(loop.weigh(model(batch).sum()))
                optimizer.step()
                optimizer.zero_grad()
            if accelerator.sync_gradients:
                for number, batch in enumerate(validation):
                    model(batch)
                    if number == left_at:
                        break
    assert loop.step == 3
