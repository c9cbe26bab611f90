"""The loop of Hugging Face's Trainer, on one rank."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, DistributedSampler, RandomSampler, SequentialSampler
from transformers import Trainer, TrainerCallback, TrainerState, TrainingArguments
from transformers.trainer_callback import ExportableState

import spottrain
from spottrain.adapters.transformers import SpottrainTrainer
from spottrain.data import Mixture, Streams
from spottrain.data.batch import BatchPlan
from spottrain.world.failures import UserError

pytestmark = pytest.mark.usefixtures("no_accelerator_afterwards")


class Model(nn.Module):
    """Five parameters, and samples of four tokens."""

    main_input_name = "x"

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 1)

    def num_parameters(self, **_: bool) -> int:
        return 5

    def forward(self, x: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
        return {"loss": (self.linear(x).squeeze(-1) - labels).square().mean()}


def train(
    folder: Path,
    steps: int,
    callbacks: list[TrainerCallback] | None = None,
    kind: type[SpottrainTrainer] = SpottrainTrainer,
) -> SpottrainTrainer:
    data = [{"x": torch.ones(4), "labels": torch.ones(())} for _ in range(8)]
    with spottrain.session(global_batch=1, micro_batch=1, checkpoint_uri=f"file://{folder}/checkpoints") as session:
        args = TrainingArguments(
            str(folder), max_steps=steps, use_cpu=True, report_to="none", include_num_input_tokens_seen="all"
        )
        trainer = kind(session=session, model=Model(), args=args, train_dataset=data, callbacks=callbacks)
        trainer.train()
    return trainer


def test_what_the_trainer_counts_is_of_the_samples_that_weigh_something(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # As on a rank with one sample, beside one with two.
    monkeypatch.setattr(BatchPlan, "num_micro_batches", 2)
    trainer = train(tmp_path, steps=3)
    assert trainer.state.num_input_tokens_seen == 3 * 4
    assert trainer.state.total_flos == 3 * 6 * 4 * 5
    assert trainer.get_total_train_batch_size(trainer.args) == 1


def test_the_speed_in_tokens_is_that_of_the_steps_since_the_resume(tmp_path: Path) -> None:
    train(tmp_path, steps=2)
    trainer = train(tmp_path, steps=6)
    assert trainer.state.num_input_tokens_seen == 6 * 4
    assert trainer._initial_num_input_tokens_seen == 2 * 4


class Odd(TrainerCallback, ExportableState):  # type: ignore[misc]
    """It keeps, and logs, what is no JSON."""

    def __init__(self) -> None:
        self.seen: dict[str, Any] = {}

    def on_step_end(self, args: Any, state: TrainerState, control: Any, **_: Any) -> None:
        logged = {"scalar": np.float32(state.global_step), "tensor": torch.tensor([1.0, 2.0]), "array": np.arange(3)}
        state.log_history.append({**logged, "step": state.global_step})
        self.seen = logged

    def state(self) -> dict[str, Any]:
        return {"args": {}, "attributes": {"seen": self.seen}}


def test_what_is_logged_or_kept_by_a_callback_may_be_of_numpy_or_torch(tmp_path: Path) -> None:
    train(tmp_path, steps=2, callbacks=[Odd()])
    again = Odd()
    trainer = train(tmp_path, steps=3, callbacks=[again])
    first, second, third = [entry for entry in trainer.state.log_history if "scalar" in entry]
    assert (first["scalar"], second["scalar"], third["scalar"]) == (1.0, 2.0, 3.0)
    assert torch.equal(first["tensor"], third["tensor"])
    assert np.array_equal(second["array"], third["array"])
    assert again.seen["scalar"] == 3.0


class Logging(Trainer):  # type: ignore[misc]
    """Its methods only call those of the Trainer."""

    def _get_train_sampler(self, *dataset: Any) -> Any:
        return super()._get_train_sampler(*dataset)

    def get_train_dataloader(self) -> Any:
        return super().get_train_dataloader()


class Ours(SpottrainTrainer, Logging):
    """As Ours and Logging, before and after SpottrainTrainer."""

    def get_train_dataloader(self) -> Any:
        return super().get_train_dataloader()


def test_a_subclass_whose_methods_only_call_those_of_the_trainer_trains(tmp_path: Path) -> None:
    plain, ours = train(tmp_path / "plain", steps=2), train(tmp_path / "ours", steps=2, kind=Ours)
    assert ours.state.global_step == 2
    assert torch.equal(ours.model.linear.weight, plain.model.linear.weight)


class InTurn(SpottrainTrainer):
    def _get_train_sampler(self, *_: Any) -> Any:
        return SequentialSampler(self.train_dataset)


class WithReplacement(SpottrainTrainer):
    def _get_train_sampler(self, *_: Any) -> Any:
        return RandomSampler(self.train_dataset, replacement=True)


class Turned(SpottrainTrainer):
    """Each epoch begins at another sample."""

    def _get_train_sampler(self, *_: Any) -> Any:
        number = len(self.train_dataset)
        return DistributedSampler(self.train_dataset, num_replicas=1, rank=0, seed=number)


class Continued(SpottrainTrainer):
    """Its generator goes on from epoch to epoch, so that a resume would not know where it is."""

    def _get_train_sampler(self, *_: Any) -> Any:
        return RandomSampler(self.train_dataset, generator=torch.Generator().manual_seed(3))


class Repeated(SpottrainTrainer):
    def _get_train_sampler(self, *_: Any) -> Any:
        return [0, 0, 1, 1]


class Half(Trainer):  # type: ignore[misc]
    def get_train_dataloader(self) -> Any:
        return self.accelerator.prepare(DataLoader(self.train_dataset[:4], shuffle=True))


class Reversed(SpottrainTrainer):
    def get_train_dataloader(self) -> Any:
        return reversed(list(super().get_train_dataloader()))


def labels(
    kind: type[SpottrainTrainer],
    folder: Path,
    steps: int,
    *,
    global_batch: int = 2,
    strategy: str = "random",
    data: Any = None,
) -> list[list[float]]:
    """The labels of the batch of each step of a generation. By default, of eight items of lengths that differ."""
    if data is None:
        data = [{"x": torch.ones(1 + number % 4), "labels": torch.tensor(float(number))} for number in range(8)]
    seen: list[list[float]] = []

    def collate(items: list[dict[str, Any]]) -> dict[str, Any]:
        seen.append([item["labels"].item() for item in items])
        return {"x": torch.ones(len(items), 4), "labels": torch.ones(len(items))}

    with spottrain.session(
        global_batch=global_batch, micro_batch=global_batch, checkpoint_uri=f"file://{folder}/commits"
    ) as session:
        args = TrainingArguments(
            str(folder),
            max_steps=steps,
            use_cpu=True,
            report_to="none",
            train_sampling_strategy=strategy,
            dataloader_num_workers=0,
            remove_unused_columns=False,
        )
        kind(
            session=session,
            model=Model(),
            args=args,
            train_dataset=data,
            data_collator=collate,
            processing_class=Names(),
        ).train()
    return seen


class Names:
    """Stands for a tokenizer, of which the Trainer asks the name of the input."""

    model_input_names = ("x",)


def test_samples_are_grouped_by_length_for_the_whole_batch(tmp_path: Path) -> None:
    batches = labels(SpottrainTrainer, tmp_path, 4, strategy="group_by_length")
    assert sorted(number for batch in batches for number in batch) == [*range(8)]
    assert batches[0][0] % 4 == 3, "the longest one comes first"


@pytest.mark.parametrize("kind", [InTurn, WithReplacement, Turned])
def test_the_order_of_a_sampler_is_kept_and_resumed(kind: type[SpottrainTrainer], tmp_path: Path) -> None:
    undisturbed = labels(kind, tmp_path / "once", 8)
    assert labels(kind, tmp_path / "twice", 3) + labels(kind, tmp_path / "twice", 8) == undisturbed
    if kind is InTurn:
        assert undisturbed[:2] == [[0, 1], [2, 3]]
    else:
        assert undisturbed[:4] != undisturbed[4:]


@pytest.mark.parametrize(
    ("kind", "sentence"),
    [
        (Continued, "order(0) returned another order when it was called again"),
        (Repeated, "Repeated brings an order of samples of its own (_get_train_sampler), with 4 of them in an epoch"),
    ],
)
def test_a_sampler_that_could_not_be_resumed_is_refused(
    kind: type[SpottrainTrainer], sentence: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        labels(kind, tmp_path, 2)
    assert sentence in capsys.readouterr().err


@pytest.mark.parametrize("other", [Half, Reversed])
def test_a_subclass_with_an_order_of_its_own_is_refused_by_its_name(
    other: type[Trainer], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    kind = other if issubclass(other, SpottrainTrainer) else type("Mixed", (SpottrainTrainer, other), {})
    with pytest.raises(SystemExit):
        train(tmp_path, steps=2, kind=kind)
    assert f"{other.__name__} brings an order of samples of its own" in capsys.readouterr().err


def item(number: float) -> dict[str, torch.Tensor]:
    return {"x": torch.ones(4), "labels": torch.tensor(float(number))}


def endless(kind: str) -> Any:
    streams = Streams(lambda stream, number: (item(10 * stream + place) for place in range(5)), streams=2, window=3)
    return (
        streams if kind == "streams" else Mixture({"list": ([item(50), item(51), item(52)], 1), "web": (streams, 1)})
    )


@pytest.mark.parametrize("kind", ["streams", "mixture"])
def test_data_without_epochs_are_resumed_in_their_order(kind: str, tmp_path: Path) -> None:
    undisturbed = labels(SpottrainTrainer, tmp_path / "once", 8, data=endless(kind))
    first = labels(SpottrainTrainer, tmp_path / "twice", 3, data=endless(kind))
    assert first + labels(SpottrainTrainer, tmp_path / "twice", 8, data=endless(kind)) == undisturbed
    used = [label for batch in undisturbed for label in batch]
    assert sum(label < 50 for label in used) == (16 if kind == "streams" else 8)
    in_turn = labels(SpottrainTrainer, tmp_path / "in turn", 2, data=endless(kind), strategy="sequential")
    assert in_turn == ([[0, 10], [1, 11]] if kind == "streams" else [[0, 50], [51, 10]])


class WithSampler(SpottrainTrainer):
    def _get_train_sampler(self, train_dataset: Any = None) -> Any:
        return SequentialSampler(self.train_dataset)


@pytest.mark.parametrize(
    ("kind", "how", "sentence"),
    [
        (SpottrainTrainer, {"max_steps": -1}, r"Mixture\) has no epochs.*set max_steps in TrainingArguments"),
        (
            SpottrainTrainer,
            {"train_sampling_strategy": "group_by_length"},
            r"so that group_by_length can't be followed",
        ),
        (WithSampler, {}, r"Mixture\) has an order of its own.*_get_train_sampler of WithSampler can't"),
    ],
)
def test_what_needs_epochs_or_another_order_is_refused_for_data_without(
    kind: type[SpottrainTrainer], how: dict[str, Any], sentence: str, tmp_path: Path
) -> None:
    args = TrainingArguments(str(tmp_path), **{"max_steps": 1, "use_cpu": True, "report_to": "none", **how})
    with spottrain.session(global_batch=2, micro_batch=1) as session, pytest.raises(UserError, match=sentence):
        kind(session=session, model=Model(), args=args, train_dataset=endless("mixture"))
