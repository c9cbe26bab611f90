"""A loop of the script's own over the library's data: batches, epochs, and batches that the script gives up."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim.lr_scheduler import StepLR

import spottrain
from spottrain.world.failures import UserError

pytestmark = pytest.mark.usefixtures("world_of_its_own")

SAMPLES = [torch.full((3,), float(number)) for number in range(10)]


class Seen:
    """What a loop has seen, by epoch, and where it stops."""

    def __init__(self) -> None:
        self.batches: dict[int, list[list[int]]] = {}
        self.ends: list[int] = []
        self.rates: list[float] = []
        self.weights = torch.empty(0)


def train(folder: Path, *, epochs: int = 3, leave_after: int | None = None) -> Seen:
    """Epochs of 4, 4 and 2 samples. It leaves after so many steps, as after a notice."""
    torch.manual_seed(1)
    model = nn.Linear(3, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    schedule = StepLR(optimizer, 1, 0.5)
    found = Seen()
    with spottrain.session(global_batch=4, checkpoint_uri=f"file://{folder}") as session:
        run = session.attach(
            epochs=epochs, dataset=SAMPLES, model=model, optimizer=optimizer, schedule=schedule, ends=found.ends
        )
        for epoch in run.epochs():
            assert len(epoch) == 3
            for batch in epoch:
                found.batches.setdefault(epoch.number, []).append(batch[:, 0].int().tolist())
                loss = model(batch).square().mean()
                assert run.weigh(torch.ones(())) == 1.0  # the one rank has all of each batch, also of the last
                optimizer.zero_grad()
                torch.autograd.backward(run.weigh(loss))
                optimizer.step()
                run.boundary(loss)
                if run.step == leave_after:
                    return found
            found.rates.append(optimizer.param_groups[0]["lr"])
            found.ends.append(epoch.number)
            schedule.step()
        assert run.step == run.total
        found.weights = model.weight.detach()
    return found


def test_each_epoch_has_each_sample_once_and_ends_exactly(tmp_path: Path) -> None:
    found = train(tmp_path)
    for batches in found.batches.values():
        assert [len(batch) for batch in batches] == [4, 4, 2]
        assert sorted(sample for batch in batches for sample in batch) == [*range(10)]
    assert found.batches[0] != found.batches[1]
    assert (found.ends, found.rates) == ([0, 1, 2], [0.1, 0.05, 0.025])


@pytest.mark.parametrize("leave_after", [1, 3, 4, 6, 8])
def test_a_loop_by_epochs_resumes_anywhere(leave_after: int, tmp_path: Path) -> None:
    """Also after the last step of an epoch, whose end the script has not made."""
    whole = train(tmp_path / "whole")
    before = train(tmp_path / "left", leave_after=leave_after)
    after = train(tmp_path / "left")
    torch.testing.assert_close(after.weights, whole.weights, rtol=0, atol=0)
    assert after.ends == whole.ends
    for number, batches in whole.batches.items():
        assert before.batches.get(number, []) + after.batches.get(number, []) == batches


def test_steps_run_on_over_the_ends_of_epochs() -> None:
    model = nn.Linear(3, 1)
    with spottrain.session(global_batch=4) as session:
        run = session.attach(total=5, dataset=SAMPLES, shuffle=False, model=model)
        found = []
        for batch in run.batches():
            found.append(batch[:, 0].int().tolist())
            run.boundary()
    assert found == [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9, 0, 1], [2, 3, 4, 5], [6, 7, 8, 9]]


def test_a_batch_that_is_given_up_is_a_step_without_an_update() -> None:
    model = nn.Linear(3, 1)
    with spottrain.session(global_batch=4) as session:
        run = session.attach(total=3, dataset=SAMPLES, shuffle=False, model=model)
        found = []
        for batch in run.batches():
            found.append((run.step, int(batch[0, 0])))
            if run.step != 1:
                run.boundary()
        assert run.step == 3
    assert found == [(0, 0), (1, 4), (2, 8)]


def test_epochs_of_data_of_ones_own_count_their_steps(tmp_path: Path) -> None:
    def go(leave_after: int | None = None) -> list[tuple[int, int]]:
        seen = []
        with spottrain.session(checkpoint_uri=f"file://{tmp_path}") as session:
            run = session.attach(epochs=2, steps_per_epoch=3, model=nn.Linear(1, 1))
            for epoch in run.epochs():
                for number in epoch:
                    seen.append((epoch.number, number))
                    run.boundary()
                    if run.step == leave_after:
                        return seen
                seen.append((epoch.number, -1))
        return seen

    assert go(3) == [(0, 0), (0, 1), (0, 2)]
    assert go() == [(0, -1), (1, 0), (1, 1), (1, 2), (1, -1)]


def test_an_order_of_the_scripts_own_goes_on_where_it_was(tmp_path: Path) -> None:
    def order(epoch: int) -> list[int]:
        return [9 - epoch, 2, 3, 4][: 4 - epoch]

    def go(leave_after: int | None = None) -> list[list[int]]:
        seen = []
        with spottrain.session(global_batch=2, checkpoint_uri=f"file://{tmp_path}") as session:
            run = session.attach(epochs=2, dataset=SAMPLES, order=order, model=nn.Linear(1, 1))
            for epoch in run.epochs():
                for batch in epoch:
                    seen.append(batch[:, 0].int().tolist())
                    run.boundary()
                    if run.step == leave_after:
                        return seen
        return seen

    assert go(3) == [[9, 2], [3, 4], [8, 2]]
    assert go() == [[3]]


def boundary_without_a_batch(session: spottrain.Session) -> None:
    run = session.attach(total=2, dataset=SAMPLES, model=nn.Linear(1, 1))
    for _ in run.batches():
        run.boundary()
        run.boundary()


def boundary_between_epochs(session: spottrain.Session) -> None:
    run = session.attach(epochs=2, dataset=SAMPLES, model=nn.Linear(1, 1))
    for epoch in run.epochs():
        for _ in epoch:
            run.boundary()
        run.boundary()


def gather_too_few(session: spottrain.Session) -> None:
    session.attach(total=2, dataset=SAMPLES, model=nn.Linear(1, 1)).gather(torch.ones(3, 2))


def left_epoch(session: spottrain.Session) -> None:
    for epoch in session.attach(epochs=2, dataset=SAMPLES, model=nn.Linear(1, 1)).epochs():
        for _ in epoch:
            break


@pytest.mark.parametrize(
    ("do", "said"),
    [
        (lambda session: session.attach(model=[]), "needs a length, and was given none: pass total, .* or epochs"),
        (lambda session: session.attach(epochs=1, model=[]), "epochs need an end: pass the dataset"),
        (
            lambda session: session.attach(epochs=1, steps_per_epoch=2, dataset=SAMPLES, model=[]),
            "epochs of a data set have the steps that its samples fill",
        ),
        (lambda session: session.attach(total=1, steps_per_epoch=2), "steps_per_epoch goes with epochs"),
        (lambda session: session.attach(epochs=1, steps_per_epoch=0), "an epoch has at least one step"),
        (lambda session: session.attach(total=1, loader={}), "session.attach was given none; pass dataset, too"),
        (lambda session: session.attach(total=1, dataset={"train": []}), "dataset is a mapping"),
        (lambda session: session.attach(total=1, seen=[]).batches(), r"session\.attach\(total=\.\.\., dataset="),
        (lambda session: next(session.attach(total=1, seen=[]).epochs()), r"session\.attach\(epochs=\.\.\.\)"),
        (boundary_without_a_batch, "in step 2 before its batch was fetched"),
        (boundary_between_epochs, "after step 3, the last one of its epoch"),
        (gather_too_few, r"shape \[3, 2\], and this rank has 4 samples of the step's 4"),
        (left_epoch, "was left after 0 of its 3 steps"),
    ],
)
def test_what_has_no_meaning_is_refused(do: Callable[[spottrain.Session], Any], said: str) -> None:
    with spottrain.session(global_batch=4) as session, pytest.raises(UserError, match=said):
        do(session)


@pytest.mark.parametrize(("count", "weighed"), [(3, 2.0), (torch.tensor(3), 2.0), (0, 0.0)])
def test_a_mean_over_tokens_is_weighed_by_their_number(count: torch.Tensor | int, weighed: float) -> None:
    """Of no tokens it is NaN, which must not spoil those of other ranks."""
    with spottrain.session(global_batch=4) as session:
        run = session.attach(total=1, own=[])
        loss = torch.tensor(2.0 if count else torch.nan, requires_grad=True)
        assert run.weigh(loss, count).item() == weighed
        run.boundary()
