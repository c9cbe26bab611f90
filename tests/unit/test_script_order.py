"""The script's own order, and the ends of epochs: properties of pure functions."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.utils.data import BatchSampler, RandomSampler, WeightedRandomSampler

import spottrain
from one_rank_runs import train
from spottrain.checkpoint.errors import CheckpointMismatch
from spottrain.data import random_state
from spottrain.data.audit import AuditHeader, AuditRecord, AuditWriter, read_audit
from spottrain.data.batch import BatchPlan
from spottrain.data.batches import Batches
from spottrain.data.order import Permutation
from spottrain.data.script_order import OrderPlace, ScriptOrder
from spottrain.world.failures import UserError

NUM_SAMPLES = 20
INDICES = st.integers(0, NUM_SAMPLES - 1)
EPOCHS = st.lists(st.lists(INDICES, min_size=1, max_size=30), min_size=1, max_size=5)
EPOCHS_OF_BATCHES = st.lists(
    st.lists(st.lists(INDICES, min_size=1, max_size=6), min_size=1, max_size=8), min_size=1, max_size=5
)


def of_script(epochs: Any) -> ScriptOrder:
    """The order of these epochs, again and again."""
    made = epochs if callable(epochs) else lambda epoch: epochs[epoch % len(epochs)]
    return ScriptOrder(made, num_samples=NUM_SAMPLES, seed=3, largest_batch=6)


def steps_of(batches: Batches, number: int) -> list[list[int]]:
    return [batches.order.samples(batches.at(step).positions).tolist() for step in range(number)]


@settings(max_examples=30)
@given(EPOCHS, st.integers(1, 7))
def test_batches_of_a_scripts_indices_run_on_over_the_epochs(epochs: list[list[int]], size: int) -> None:
    every = [index for epoch in epochs * 8 for index in epoch]
    found = steps_of(Batches(of_script(epochs), size), number := len(every) // size)
    assert found == [every[step * size : (step + 1) * size] for step in range(number)]


@settings(max_examples=30)
@given(EPOCHS, st.integers(1, 7))
def test_by_epoch_the_last_batch_is_what_is_left(epochs: list[list[int]], size: int) -> None:
    wanted = [epoch[begin : begin + size] for epoch in epochs * 3 for begin in range(0, len(epoch), size)]
    batches = Batches(of_script(epochs), size, by_epoch=True, length=3 * len(epochs))
    assert steps_of(batches, len(wanted)) == wanted
    assert list(batches.steps_from(0)) == list(range(len(wanted)))
    assert [batches.is_over(step) for step in range(len(wanted) + 1)] == [False] * len(wanted) + [True]


@settings(max_examples=30)
@given(EPOCHS_OF_BATCHES, st.booleans())
def test_a_scripts_batches_are_those_of_the_steps(epochs: list[list[list[int]]], by_epoch: bool) -> None:
    wanted = [batch for epoch in epochs * 3 for batch in epoch]
    assert steps_of(Batches(of_script(epochs), 6, by_epoch=by_epoch), len(wanted)) == wanted


@given(st.integers(1, 40), st.integers(1, 50), st.integers(0, 4000))
def test_the_ends_of_the_sessions_own_epochs_are_exact_at_any_step(num_samples: int, size: int, step: int) -> None:
    batches = Batches(Permutation(num_samples=num_samples, seed=1), size, by_epoch=True, length=10_000)
    number, index = divmod(step, -(-num_samples // size))
    batch = batches.at(step)
    begin, end = number * num_samples + index * size, (number + 1) * num_samples
    assert batch.positions == range(begin, min(begin + size, end))
    assert (batch.epoch.number, batch.ends_epoch) == (number, batch.positions.stop == end)
    assert batches.total_steps == 10_000 * -(-num_samples // size)


@given(st.integers(1, 40), st.integers(1, 50), st.integers(0, 400))
def test_a_batch_that_runs_on_ends_an_epoch_if_it_holds_its_last_sample(num: int, size: int, step: int) -> None:
    batch = Batches(Permutation(num_samples=num), size).at(step)
    assert batch.ends_epoch == any(position % num == num - 1 for position in batch.positions)


@settings(max_examples=30)
@given(EPOCHS | EPOCHS_OF_BATCHES, st.booleans(), st.integers(1, 30))
def test_a_resume_needs_no_epoch_before_its_own(epochs: list[Any], by_epoch: bool, step: int) -> None:
    order = of_script(epochs)
    batches = Batches(order, 6, by_epoch=by_epoch, length=1000)
    place = OrderPlace(order, lambda: batches)
    place.step = step
    saved = place.state_dict()

    asked: list[int] = []
    resumed = of_script(epochs)

    def ask(epoch: int) -> list[Any]:
        asked.append(epoch)
        return list(epochs[epoch % len(epochs)])

    resumed._function = ask
    again = Batches(resumed, 6, by_epoch=by_epoch, length=1000)
    OrderPlace(resumed, lambda: again).load_state_dict(saved)
    for number in range(step, step + 5):
        assert again.at(number).positions == batches.at(number).positions
        assert resumed.samples(again.at(number).positions).tolist() == steps_of(batches, number + 1)[-1]
    assert min(asked, default=saved["epoch"]) >= saved["epoch"]


def test_a_resume_in_another_order_is_refused() -> None:
    batches = Batches(of_script([[0, 1, 2], [3, 4]]), 2, by_epoch=True)
    place = OrderPlace(batches.order, lambda: batches)  # type: ignore[arg-type]
    place.step = 3
    other = of_script([[0, 1, 2], [4, 3]])
    again = Batches(other, 2, by_epoch=True)
    with pytest.raises(CheckpointMismatch, match=r"at step 3 .* order\(1\) returns other indices now"):
        OrderPlace(other, lambda: again).load_state_dict(place.state_dict())


@pytest.mark.parametrize(
    "sampler",
    [
        RandomSampler(range(NUM_SAMPLES)),
        WeightedRandomSampler([0.1] * 10 + [0.9] * 10, num_samples=35),
        BatchSampler(RandomSampler(range(NUM_SAMPLES)), batch_size=6, drop_last=False),
    ],
    ids=lambda sampler: type(sampler).__name__,
)
def test_samplers_of_torch_draw_the_same_for_an_epoch_whenever_they_are_asked(sampler: Any) -> None:
    random_state.seed_everything(1)
    state = random_state.capture()
    first, second = (steps_of(Batches(of_script(lambda epoch: sampler), 6), 14) for _ in range(2))
    assert first == second
    assert first[:3] != first[7:10]
    assert random_state.capture() == state


@pytest.mark.parametrize(
    ("made", "sentence"),
    [
        ([], "order(0) has no samples"),
        ([1, 20], "order(0) has the index 20 at place 1, and the data set has the samples 0 to 19"),
        (torch.tensor([-1]), "order(0) has the index -1 at place 0"),
        (np.array([0.5]), "order(0) has at place 0 neither an index nor a list of indices"),
        ([[1], 2], "order(0) has at place 1 neither an index nor a list of indices"),
        ([[1], []], "batch 1 of order(0) has no samples"),
        ([[1], list(range(7))], "batch 1 of order(0) has 7 samples, and batch.global is 6"),
        (iter([1]), "order(0) is a list_iterator, which is no sequence of indices"),
        (None, "order(0) is a NoneType, which is no sequence of indices"),
        ({"train": 1}, "order(0) is a dict"),
    ],
)
def test_what_is_no_order_is_refused_with_its_place(made: Any, sentence: str) -> None:
    with pytest.raises(ValueError, match=re.escape(sentence)):
        of_script(lambda epoch: made)


def test_an_order_that_is_no_function_of_the_epoch_is_refused_at_once() -> None:
    no_function: Any = [0, 1]
    with pytest.raises(ValueError, match=r"order \(list\) is not a function"):
        ScriptOrder(no_function, num_samples=2, seed=0, largest_batch=1)
    generator = torch.Generator().manual_seed(0)
    with pytest.raises(ValueError, match=r"order\(0\) returned another order when it was called again"):
        of_script(lambda epoch: torch.randperm(NUM_SAMPLES, generator=generator))


def test_an_audit_of_a_scripts_order_needs_the_order(tmp_path: Path) -> None:
    order = of_script([[3, 1, 2], [5, 4]])
    header = AuditHeader(seed=3, shuffle=True, num_samples=NUM_SAMPLES, global_batch=2, order="order=", loop="epochs")
    batches, plan = Batches(order, 2, by_epoch=True), BatchPlan(global_batch=2, micro_batch=2, world_size=2)
    for rank in range(2):
        writer = AuditWriter(tmp_path, header, generation=1, rank=rank)
        for step in range(1, 4):
            share = plan.share(rank, batches.at(step - 1).positions)
            at: dict[str, Any] = {"at": 0.0, "generation": 1, "step": step, "rank": rank, "world": 2}
            writer.write(AuditRecord(positions=tuple(share), samples=tuple(order.samples(share).tolist()), **at))
    audit = read_audit(tmp_path)
    assert audit.problems(3, order=order) == []
    assert audit.problems(3, order=of_script([[3, 1, 2], [4, 5]])) == [
        "step 3 used other samples than an uninterrupted run"
    ]
    assert audit.problems(3) == ["the samples can't be checked: pass the run's order (order=) to problems(order=...)"]


def run(
    folder: Path, epochs: int, *, leave_at: int | None = None, scheduled_by: str = "epoch", **how: Any
) -> list[Any]:
    """What a script of one rank did: its steps with their rates and samples, and the ends of its epochs."""
    done: list[Any] = []
    uri = f"file://{folder}"
    with spottrain.session(
        global_batch=4, micro_batch=3, checkpoint_uri=uri, checkpoint_interval="1steps", strategy="ddp"
    ) as session:
        training = session.prepare(
            nn.Linear(4, 1),
            optimizer=lambda model: torch.optim.SGD(model.parameters(), lr=1.0),
            scheduler=lambda optimizer: torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5),
            scheduler_interval=scheduled_by,
            dataset=[torch.full((4,), float(index)) for index in range(10)],
            **how,
        )
        for epoch in training.epochs(epochs):
            for step in epoch:
                used: list[float] = []
                for batch in step.micro_batches():
                    used += batch[:, 0].tolist()
                    step.backward(0.0 * training.model(batch).sum())
                rate = training.optimizer.param_groups[0]["lr"]
                step.update()
                done.append(("step", step.number, rate, used))
                if leave_at == step.number:
                    return done
            done.append(("end", epoch.number))
    return done


@pytest.mark.usefixtures("world_of_its_own")
@pytest.mark.parametrize(
    "order", [None, lambda epoch: [[0, 1, 2], [3], [4 + epoch, 5, 6, 7]]], ids=["own", "batches"]
)
def test_an_epoch_is_resumed_where_it_was_left_and_ends_once(tmp_path: Path, order: Any) -> None:
    whole = run(tmp_path / "whole", 3, order=order)
    assert [each for each in whole if each[0] == "end"] == [("end", number) for number in range(3)]
    assert [rate for kind, _, rate, _ in (each for each in whole if each[0] == "step")] == [1.0] * 3 + [0.5] * 3 + [
        0.25
    ] * 3
    for last in (2, 3, 9):  # inside an epoch, at its end, and at that of the run
        folder = tmp_path / str(last)
        before = run(folder, 3, leave_at=last, order=order)
        after = run(folder, 3, order=order)
        assert before + after == whole, last


@pytest.mark.usefixtures("world_of_its_own")
def test_loops_that_leave_steps_out_are_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with spottrain.session(global_batch=4, strategy="ddp") as session:
        training = session.prepare(
            nn.Linear(1, 1),
            optimizer=lambda model: torch.optim.SGD(model.parameters(), lr=1.0),
            dataset=[torch.ones(1)] * 10,
        )
        epochs = training.epochs(2)
        epoch = next(epochs)
        assert len(epoch) == 3
        iter(epoch)
        with pytest.raises(UserError, match="A second loop over the steps of epoch 0"):
            iter(epoch)
        with pytest.raises(UserError, match="The loop over epoch 0 was left after 0 of its 3 steps"):
            next(epochs)


@pytest.mark.usefixtures("world_of_its_own")
@pytest.mark.parametrize(
    ("how", "sentence"),
    [
        ({"order": [1]}, "order (list) is not a function"),
        ({"order": lambda epoch: [1], "shuffle": False}, "order and shuffle=False were given"),
        ({"order": lambda epoch: [1 if epoch == 0 else 99]}, "order(1) has the index 99 at place 0"),
        ({"scheduled_by": "year"}, "scheduler_interval is 'year'"),
        ({"stateful": {"order": object()}}, "the name order is taken by the order of the samples"),
    ],
)
def test_orders_and_intervals_that_do_not_fit_are_refused(
    how: dict[str, Any], sentence: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit, match="1"):
        run(tmp_path, 2, **how)
    assert sentence in capsys.readouterr().err


@pytest.mark.usefixtures("world_of_its_own")
def test_a_loop_of_another_kind_does_not_resume_the_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run(tmp_path, 3, leave_at=2)
    with pytest.raises(SystemExit, match="1"):
        train(f"file://{tmp_path}", None, 2)
    assert re.search(r"was made with .*loop epochs, and this run has .*loop steps", capsys.readouterr().err)
