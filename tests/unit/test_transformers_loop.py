"""The loop of Hugging Face's Trainer, on one rank."""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import spottrain
from spottrain.data import Mixture, Streams
from spottrain.data.batch import BatchPlan
from spottrain.world.failures import UserError


@pytest.fixture
def loops(no_accelerator_afterwards: None) -> Any:
    """The module `trainer_loops`, which not every process that collects tests has to import."""
    return importlib.import_module("trainer_loops")


def test_what_the_trainer_counts_is_of_the_samples_that_weigh_something(
    loops: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # As on a rank with one sample, beside one with two.
    monkeypatch.setattr(BatchPlan, "num_micro_batches", 2)
    trainer = loops.train(tmp_path, steps=3)
    assert trainer.state.num_input_tokens_seen == 3 * 4
    assert trainer.state.total_flos == 3 * 6 * 4 * 5
    assert trainer.get_total_train_batch_size(trainer.args) == 1


def test_the_speed_in_tokens_is_that_of_the_steps_since_the_resume(loops: Any, tmp_path: Path) -> None:
    loops.train(tmp_path, steps=2)
    trainer = loops.train(tmp_path, steps=6)
    assert trainer.state.num_input_tokens_seen == 6 * 4
    assert trainer._initial_num_input_tokens_seen == 2 * 4


def test_what_is_logged_or_kept_by_a_callback_may_be_of_numpy_or_torch(loops: Any, tmp_path: Path) -> None:
    loops.train(tmp_path, steps=2, callbacks=[loops.Odd()])
    again = loops.Odd()
    trainer = loops.train(tmp_path, steps=3, callbacks=[again])
    first, second, third = [entry for entry in trainer.state.log_history if "scalar" in entry]
    assert (first["scalar"], second["scalar"], third["scalar"]) == (1.0, 2.0, 3.0)
    assert torch.equal(first["tensor"], third["tensor"])
    assert np.array_equal(second["array"], third["array"])
    assert again.seen["scalar"] == 3.0


def test_a_subclass_whose_methods_only_call_those_of_the_trainer_trains(loops: Any, tmp_path: Path) -> None:
    plain, ours = loops.train(tmp_path / "plain", steps=2), loops.train(tmp_path / "ours", steps=2, kind=loops.Ours)
    assert ours.state.global_step == 2
    assert torch.equal(ours.model.linear.weight, plain.model.linear.weight)


def test_samples_are_grouped_by_length_for_the_whole_batch(loops: Any, tmp_path: Path) -> None:
    batches = loops.labels(loops.SpottrainTrainer, tmp_path, 4, strategy="group_by_length")
    assert sorted(number for batch in batches for number in batch) == [*range(8)]
    assert batches[0][0] % 4 == 3, "the longest one comes first"


@pytest.mark.parametrize("name", ["InTurn", "WithReplacement", "Turned"])
def test_the_order_of_a_sampler_is_kept_and_resumed(loops: Any, name: str, tmp_path: Path) -> None:
    kind = getattr(loops, name)
    undisturbed = loops.labels(kind, tmp_path / "once", 8)
    assert loops.labels(kind, tmp_path / "twice", 3) + loops.labels(kind, tmp_path / "twice", 8) == undisturbed
    if kind is loops.InTurn:
        assert undisturbed[:2] == [[0, 1], [2, 3]]
    else:
        assert undisturbed[:4] != undisturbed[4:]


@pytest.mark.parametrize(
    ("name", "sentence"),
    [
        ("Continued", "order(0) returned another order when it was called again"),
        (
            "Repeated",
            "Repeated brings an order of samples of its own (_get_train_sampler), with 4 of them in an epoch",
        ),
    ],
)
def test_a_sampler_that_could_not_be_resumed_is_refused(
    loops: Any, name: str, sentence: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        loops.labels(getattr(loops, name), tmp_path, 2)
    assert sentence in capsys.readouterr().err


@pytest.mark.parametrize("name", ["Half", "Reversed"])
def test_a_subclass_with_an_order_of_its_own_is_refused_by_its_name(
    loops: Any, name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    other = getattr(loops, name)
    kind = other if issubclass(other, loops.SpottrainTrainer) else type("Mixed", (loops.SpottrainTrainer, other), {})
    with pytest.raises(SystemExit):
        loops.train(tmp_path, steps=2, kind=kind)
    assert f"{name} brings an order of samples of its own" in capsys.readouterr().err


def item(number: float) -> dict[str, torch.Tensor]:
    return {"x": torch.ones(4), "labels": torch.tensor(float(number))}


def endless(kind: str) -> Any:
    streams = Streams(lambda stream, number: (item(10 * stream + place) for place in range(5)), streams=2, window=3)
    return (
        streams if kind == "streams" else Mixture({"list": ([item(50), item(51), item(52)], 1), "web": (streams, 1)})
    )


@pytest.mark.parametrize("kind", ["streams", "mixture"])
def test_data_without_epochs_are_resumed_in_their_order(loops: Any, kind: str, tmp_path: Path) -> None:
    undisturbed = loops.labels(loops.SpottrainTrainer, tmp_path / "once", 8, data=endless(kind))
    first = loops.labels(loops.SpottrainTrainer, tmp_path / "twice", 3, data=endless(kind))
    assert first + loops.labels(loops.SpottrainTrainer, tmp_path / "twice", 8, data=endless(kind)) == undisturbed
    used = [label for batch in undisturbed for label in batch]
    assert sum(label < 50 for label in used) == (16 if kind == "streams" else 8)
    in_turn = loops.labels(loops.SpottrainTrainer, tmp_path / "in turn", 2, data=endless(kind), strategy="sequential")
    assert in_turn == ([[0, 10], [1, 11]] if kind == "streams" else [[0, 50], [51, 10]])


@pytest.mark.parametrize(
    ("name", "how", "sentence"),
    [
        ("SpottrainTrainer", {"max_steps": -1}, r"Mixture\) has no epochs.*set max_steps in TrainingArguments"),
        (
            "SpottrainTrainer",
            {"train_sampling_strategy": "group_by_length"},
            r"so that group_by_length can't be followed",
        ),
        ("WithSampler", {}, r"Mixture\) has an order of its own.*_get_train_sampler of WithSampler can't"),
    ],
)
def test_what_needs_epochs_or_another_order_is_refused_for_data_without(
    loops: Any, name: str, how: dict[str, Any], sentence: str, tmp_path: Path
) -> None:
    args = loops.TrainingArguments(str(tmp_path), **{"max_steps": 1, "use_cpu": True, "report_to": "none", **how})
    kind = getattr(loops, name)
    with spottrain.session(global_batch=2, micro_batch=1) as session, pytest.raises(UserError, match=sentence):
        kind(session=session, model=loops.Model(), args=args, train_dataset=endless("mixture"))


@pytest.mark.parametrize(
    ("length", "by"),
    [({"num_train_epochs": 2}, "epoch"), ({"num_train_epochs": 1.6}, "steps"), ({"max_steps": 6}, "epoch")],
    ids=str,
)
def test_epochs_end_where_those_of_the_trainer_do(
    loops: Any, length: dict[str, Any], by: str, tmp_path: Path
) -> None:
    """The same holds if a run is resumed inside epochs, and after the last steps of some."""
    how = {"logging_strategy": by, "eval_strategy": by, **length}
    wanted = loops.places(tmp_path, loops.Trainer, how)
    assert loops.places_of_the_job(tmp_path / "steady", how, notice_after=0) == (wanted, 1)
    for notice_after in (1, 2):
        found, starts = loops.places_of_the_job(tmp_path / str(notice_after), how, notice_after=notice_after)
        assert found == wanted
        assert starts >= 2
