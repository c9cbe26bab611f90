"""What a script attaches to its session: kinds of state, and what is refused."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.optim.lr_scheduler import ReduceLROnPlateau, StepLR

import spottrain
from spottrain import ByRank
from spottrain.checkpoint.errors import CheckpointMismatch
from spottrain.checkpoint.format import codec
from spottrain.checkpoint.loading.loader import Loaded
from spottrain.loop.acceptance import check_stateful
from spottrain.recovery.by_rank import RankPart
from spottrain.recovery.kept_state import WeightSample
from spottrain.world.failures import UserError
from spottrain_api.settings.choices import StabilityAction
from spottrain_api.settings.stability import StabilityConfig

pytestmark = pytest.mark.usefixtures("world_of_its_own")

Attached = dict[str, Any]


def everything() -> Attached:
    """One of each kind of state that scripts have."""
    model, other = nn.Linear(3, 1), nn.Linear(3, 2)
    first = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    second = torch.optim.Adam(other.parameters(), lr=0.1)
    return {
        "model": model,
        "other": other,
        "optimizer": first,
        "second": second,
        "schedule": StepLR(second, 1, 0.5),
        "plateau": ReduceLROnPlateau(first, factor=0.5, patience=0),
        "factor": torch.zeros(2),
        "array": np.zeros(3),
        "losses": [],
        "counts": {"seen": 0},
        "scaler": torch.amp.GradScaler("cpu", init_scale=4.0),
    }


def train(folder: Path, total: int) -> Attached:
    """Each step changes everything."""
    torch.manual_seed(1)
    parts = everything()
    with spottrain.session(global_batch=4, checkpoint_uri=f"file://{folder}") as session:
        run = session.attach(total=total, **parts)
        while run.step < run.total:
            inputs = torch.full((3,), 1.0 + run.step)
            loss = parts["model"](inputs).square().sum() + parts["other"](inputs).square().sum()
            for each in (parts["optimizer"], parts["second"]):
                each.zero_grad()
            loss.backward()
            for each in (parts["optimizer"], parts["second"], parts["schedule"]):
                each.step()
            parts["plateau"].step(float(run.step))
            parts["factor"] += torch.rand(2)
            parts["array"][1] += run.step
            parts["losses"].append(loss.item())
            parts["counts"]["seen"] += 1
            parts["scaler"].scale(loss)  # without which it has no scale
            parts["scaler"].update(8.0 + run.step)
            run.boundary(loss)
    return parts


def state_of(value: Any) -> Any:
    return value.state_dict() if hasattr(value, "state_dict") else value


def test_everything_that_is_attached_resumes(tmp_path: Path) -> None:
    undisturbed = train(tmp_path / "once", 4)
    train(tmp_path / "twice", 2)
    resumed = train(tmp_path / "twice", 4)
    for name, value in undisturbed.items():
        assert codec.encode(state_of(resumed[name])) == codec.encode(state_of(value)), name


def test_a_commit_of_prepare_resumes_in_a_loop_of_the_scripts_own_and_back(tmp_path: Path) -> None:
    def prepared(total: int) -> torch.Tensor:
        with spottrain.session(global_batch=4, micro_batch=4, checkpoint_uri=f"file://{tmp_path}") as session:
            training = session.prepare(
                nn.Linear(3, 1),
                optimizer=lambda model: torch.optim.Adam(model.parameters(), lr=0.1),
                dataset=[torch.ones(3)] * 4,
            )
            for step in training.steps(total=total):
                for batch in step.micro_batches():
                    step.backward(training.model(batch).square().mean())
                step.update()
            weight: torch.Tensor = training.full_state_dict()["weight"]
            return weight

    def attached(total: int) -> torch.Tensor:
        model = nn.Linear(3, 1)
        optimizer = torch.optim.Adam(model.parameters(), lr=0.1)
        with spottrain.session(global_batch=4, checkpoint_uri=f"file://{tmp_path}") as session:
            run = session.attach(total=total, model=model, optimizer=optimizer)
            while run.step < total:
                optimizer.zero_grad()
                model(torch.ones(4, 3)).square().mean().backward()
                optimizer.step()
                run.boundary()
        return model.weight.detach()

    torch.testing.assert_close(attached(1), prepared(1))  # the second has nothing left to do
    torch.testing.assert_close(prepared(3), attached(3))


def linear() -> tuple[nn.Module, torch.optim.Optimizer]:
    model = nn.Linear(3, 1)
    return model, torch.optim.Adam(model.parameters())


class DeepSpeedEngine(nn.Module):
    """Named as DeepSpeed's."""


def spread_inside() -> Attached:
    inner = nn.Linear(1, 1)
    outer = nn.Module()
    outer.module = nn.parallel.DistributedDataParallel(inner)
    return {"average": outer}


def twice() -> Attached:
    model, optimizer = linear()
    return {"model": model, "optimizer": optimizer, "student": model}


@pytest.mark.parametrize(
    ("make", "said"),
    [
        pytest.param(lambda: {"epoch": 3}, "epoch is a int, which a resume can't change in place", id="number"),
        pytest.param(lambda: {"data": iter([])}, "data (list_iterator) has no state_dict", id="stateless"),
        pytest.param(lambda: {"model": DeepSpeedEngine()}, "model is a DeepSpeedEngine, which", id="engine"),
        pytest.param(twice, "model and student are the same object; attach it once", id="twice"),
        pytest.param(
            lambda: {"optimizer": linear()[1]},
            "the optimizer optimizer trains 2 parameters of nothing that is attached, the first of shape [1, 3]",
            id="optimizer alone",
        ),
        pytest.param(
            lambda: {"optimizer": ByRank(linear()[1])},
            "the optimizer optimizer trains 2 parameters of nothing that is attached, the first of shape [1, 3]",
            id="optimizer by rank alone",
        ),
        pytest.param(lambda: {"stability": []}, "the name stability is taken", id="name"),
        pytest.param(lambda: {"order": []}, "If one of them is the name of a state, choose another", id="keyword"),
        pytest.param(lambda: {"own": ByRank(iter([]))}, "own (list_iterator) has no state_dict", id="own, stateless"),
        pytest.param(lambda: {"seen": {"ids": {1, 2}}}, "'stateful.seen.ids' is a builtins.set", id="set"),
        pytest.param(
            lambda: {"seen": np.zeros(9999, [("id", "i4"), ("score", "f4")])},
            "'stateful.seen.values' is a numpy.ndarray",
            id="structured array",
        ),
        pytest.param(spread_inside, "average holds a DistributedDataParallel at 'module'", id="spread inside"),
    ],
)
def test_what_no_commit_could_hold_is_refused(
    make: Callable[[], Attached], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit, match="1"), spottrain.session() as session:
        session.attach(total=1, **make())
    assert said in capsys.readouterr().err


def step_alone(folder: Path, total: int, **parts: Any) -> None:
    with spottrain.session(checkpoint_uri=f"file://{folder}") as session:
        run = session.attach(total=total, **parts)
        while run.step < run.total:
            run.boundary()


@pytest.mark.parametrize(
    ("names", "said"),
    [
        (("model", "optimizer", "critic"), "has no 'critic'"),
        (("model",), "holds the model or optimizer 'optimizer', which the script doesn't have"),
    ],
)
def test_what_the_commit_lacks_or_the_script_is_refused_by_its_name(
    names: tuple[str, ...], said: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model, optimizer = linear()
    parts = {"model": model, "optimizer": optimizer, "critic": nn.Linear(1, 1)}
    step_alone(tmp_path, 1, model=model, optimizer=optimizer)
    with pytest.raises(SystemExit, match="1"):
        step_alone(tmp_path, 2, **{name: parts[name] for name in names})
    assert said in capsys.readouterr().err


def add_layer(model: nn.Sequential) -> None:
    model.append(nn.Linear(3, 1))


@pytest.mark.parametrize("change", [fully_shard, add_layer])
def test_a_model_that_is_spread_or_changed_after_it_was_attached_is_refused(change: Callable[..., Any]) -> None:
    model = nn.Sequential(nn.Linear(3, 3))
    optimizer = torch.optim.Adam(model.parameters())
    with spottrain.session() as session:
        run = session.attach(total=2, model=model, optimizer=optimizer)
        change(model)
        with pytest.raises(UserError, match=r"the parameter \d\.weight is not one of those that were attached"):
            run.boundary()


def two_loops(folder: Path, *, leave_after: int | None = None) -> list[tuple[str, int]]:
    """Pre-training and fine-tuning in one run, of which a generation may be left in either."""
    model, optimizer = linear()
    seen: list[tuple[str, int]] = []
    with spottrain.session(checkpoint_uri=f"file://{folder}") as session:
        run = session.attach(total=4, model=model, optimizer=optimizer)
        for name, stop in (("pretrain", 2), ("finetune", 4)):
            while run.step < stop:
                if run.step == leave_after:
                    return seen
                seen.append((name, run.step))
                run.boundary()
    return seen


@pytest.mark.parametrize("leave_after", [1, 2, 3])
def test_two_loops_one_after_the_other_are_one_run(leave_after: int, tmp_path: Path) -> None:
    whole = [("pretrain", 0), ("pretrain", 1), ("finetune", 2), ("finetune", 3)]
    assert two_loops(tmp_path, leave_after=leave_after) + two_loops(tmp_path) == whole


def test_a_boundary_after_the_last_step_is_refused() -> None:
    with spottrain.session() as session:
        run = session.attach(total=1, counts=[])
        run.boundary()
        with pytest.raises(UserError, match=r"run\.boundary was called after step 1, the last one"):
            run.boundary()


def test_bad_steps_are_skipped_if_the_script_asks() -> None:
    model = nn.Linear(3, 1)
    optimizer = torch.optim.Adam(model.parameters())
    before = model.weight.detach().clone()
    with spottrain.session(stability=StabilityConfig(non_finite=StabilityAction.SKIP)) as session:
        run = session.attach(total=2, model=model, optimizer=optimizer)
        asked = []
        for factor in (float("nan"), 1.0):
            loss = model(torch.ones(3)).sum() * factor
            optimizer.zero_grad()
            loss.backward()
            asked.append(run.may_update(loss))
            if asked[-1]:
                optimizer.step()
            else:
                torch.testing.assert_close(model.weight.detach(), before)
            run.boundary()
    assert asked == [False, True]


def test_a_script_that_does_not_ask_is_refused_under_stability() -> None:
    model, optimizer = linear()
    stability = StabilityConfig(non_finite=StabilityAction.SKIP)
    with spottrain.session(stability=stability) as session:
        run = session.attach(total=2, model=model, optimizer=optimizer)
        with pytest.raises(UserError, match=r"only `if run\.may_update\(loss\)`"):
            run.boundary()


@pytest.mark.parametrize("strategy", ["ddp", "fsdp"])
def test_a_frozen_model_is_spread_and_resumes_beside_the_one_that_it_teaches(strategy: str, tmp_path: Path) -> None:
    def taught(total: int) -> dict[str, Any]:
        torch.manual_seed(total)
        with spottrain.session(strategy=strategy, checkpoint_uri=f"file://{tmp_path}") as session:
            teacher = session.spread(nn.Linear(3, 1).requires_grad_(False))
            student = session.spread(nn.Linear(3, 1))
            optimizer = torch.optim.SGD(student.parameters(), lr=0.1)
            run = session.attach(total=total, teacher=teacher, student=student, optimizer=optimizer)
            while run.step < run.total:
                optimizer.zero_grad()
                (student(torch.ones(1, 3)) - teacher(torch.ones(1, 3))).square().sum().backward()
                optimizer.step()
                run.boundary()
            return run.full_state_dict("teacher")

    first, resumed = taught(1), taught(2)
    assert torch.equal(first["weight"], resumed["weight"])


@pytest.mark.parametrize("name", ["target", "factor", "model", "nothing"])
def test_what_a_script_changes_within_a_step_is_noticed(name: str) -> None:
    """A step that has changed more than a commit keeps can't be abandoned."""
    model, optimizer = linear()
    target, factor = nn.Linear(2, 2), torch.zeros(2)
    parts: Attached = {"model": model, "optimizer": optimizer, "target": target, "factor": factor}
    changed: dict[str, list[torch.Tensor]] = {
        "target": [target.weight],
        "factor": [factor],
        "model": [*model.parameters()],
        "nothing": [],
    }
    with spottrain.session() as session:
        sample = WeightSample.of(session.attach(total=1, **parts)._training._state)
        with torch.no_grad():
            for each in changed[name]:
                each.add_(1.0)
    assert sample.is_same() == (name == "nothing")


def lives(folder: Path, total: int, **how: Any) -> list[int]:
    """What a rank of its own has counted, in a world that has one rank."""
    own: list[int] = []
    with spottrain.session(checkpoint_uri=f"file://{folder}") as session:
        run = session.attach(total=total, own=ByRank(own, **how))
        while run.step < run.total:
            own.append(run.step)
            run.boundary()
    return own


def test_state_of_each_rank_resumes(tmp_path: Path) -> None:
    lives(tmp_path, 2)
    assert lives(tmp_path, 3) == [0, 1, 2]


def test_state_of_each_rank_is_refused_at_once_if_the_job_may_change_its_size() -> None:
    with spottrain.session() as session:
        session.config = session.config.model_copy(update={"max_world_size": 4})
        with pytest.raises(UserError, match="own is each rank's own, and the job may run with 1 to 4 ranks"):
            session.attach(total=1, own=ByRank([]))


def test_large_state_of_each_rank_resumes(tmp_path: Path) -> None:
    uri = f"file://{tmp_path}"
    hidden, replay = torch.rand(1 << 19), np.random.default_rng(0).random((1 << 10, 1 << 8))
    states: list[dict[str, Any]] = [
        {"hidden": hidden, "replay": replay},
        {"hidden": hidden[:1], "replay": replay[:1]},
    ]
    for total, own in enumerate(states, start=1):
        with spottrain.session(checkpoint_uri=uri) as session:
            run = session.attach(total=total, own=ByRank(own))
            assert torch.equal(own["hidden"], hidden)
            assert np.array_equal(own["replay"], replay)
            run.boundary()
    assert max(path.stat().st_size for path in tmp_path.rglob("manifest*")) < 100_000


class Loader:
    """As torchdata's StatefulDataLoader: it iterates over a data set, and has a state."""

    def __init__(self, dataset: list[int]) -> None:
        self.dataset = dataset
        self._next = 0

    def __iter__(self) -> Iterator[int]:
        while self._next < len(self.dataset):
            self._next += 1
            yield self.dataset[self._next - 1]

    def state_dict(self) -> dict[str, int]:
        return {"next": self._next}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self._next = state["next"]


def read(folder: Path, total: int) -> list[int]:
    """The items that a loop over a loader has read."""
    loader, items = Loader([3, 1, 4, 1, 5]), []
    with spottrain.session(checkpoint_uri=f"file://{folder}") as session:
        run = session.attach(total=total, reader=loader)
        for item in loader:
            items.append(item)
            run.boundary()
            if run.step == run.total:
                break
    return items


def test_a_loader_with_a_state_is_each_ranks_own_and_reads_on(tmp_path: Path) -> None:
    assert read(tmp_path, 2) == [3, 1]
    assert read(tmp_path, 5) == [4, 1, 5]


def test_a_loader_is_refused_at_another_number_of_ranks_with_what_is_exact_at_any() -> None:
    advice = "let the session read the data.* with items by index or as spottrain.data.Streams"
    with spottrain.session() as session:
        session.config = session.config.model_copy(update={"max_world_size": 4})
        with pytest.raises(UserError, match=f"reader is each rank's own, .* {advice}"):
            session.attach(total=1, reader=Loader([1]))
    part = RankPart(part=Loader([1]), rank=0, world_size=3, at_another_size="refuse")
    with pytest.raises(CheckpointMismatch, match=f"holds loader of 2 ranks, and there are 3 now. .* {advice}"):
        part.state_in("loader", Loaded(step=1, state={}, extra={}, rank_state=None, rank_states=({}, {})))


def test_a_loader_is_no_state_that_all_ranks_share() -> None:
    with pytest.raises(UserError, match=r"loader \(Loader\) reads data for its rank alone.* spottrain.data.Streams"):
        check_stateful({"loader": Loader([1])})
