"""The Trainer on one rank, with subclasses of it.

It imports transformers, which takes seconds: the tests that need it import it themselves.
"""

from __future__ import annotations

import os
import signal
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.utils.data import DataLoader, DistributedSampler, RandomSampler, SequentialSampler
from transformers import Trainer, TrainerCallback, TrainerState, TrainingArguments
from transformers.trainer_callback import ExportableState

import spottrain
from spottrain.adapters.transformers import SpottrainTrainer
from spottrain.world.failures import Drained


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


class WithSampler(SpottrainTrainer):
    def _get_train_sampler(self, train_dataset: Any = None) -> Any:
        return SequentialSampler(self.train_dataset)


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


SOME = [{"x": torch.ones(4), "labels": torch.ones(())} for _ in range(14)]  # an epoch: steps of 4, 4, 4 and 2


class Places(TrainerCallback, ExportableState):  # type: ignore[misc]
    """It notes where steps and epochs end, and sends this process a notice."""

    def __init__(self, *, notice_after: int) -> None:
        self.seen: list[Any] = []
        self._steps_left = notice_after

    def on_step_end(self, args: Any, state: TrainerState, control: Any, **_: Any) -> None:
        self.seen.append([state.global_step, state.epoch])
        self._steps_left -= 1
        if self._steps_left == 0:
            os.kill(os.getpid(), signal.SIGTERM)

    def on_epoch_end(self, args: Any, state: TrainerState, control: Any, **_: Any) -> None:
        self.seen.append(["end", state.epoch])

    def state(self) -> dict[str, Any]:
        return {"args": {}, "attributes": {"seen": self.seen}}


def places(folder: Path, kind: type[Trainer], how: dict[str, Any], *, notice_after: int = 0, **own: Any) -> list[Any]:
    """Where a Trainer has logged, evaluated and called back, and the lengths that it names."""
    callback = Places(notice_after=notice_after)
    args = TrainingArguments(
        str(folder),
        per_device_train_batch_size=4,
        logging_steps=3,
        eval_steps=4,
        use_cpu=True,
        report_to="none",
        disable_tqdm=True,
        **how,
    )
    trainer = kind(model=Model(), args=args, train_dataset=SOME, eval_dataset=SOME[:2], callbacks=[callback], **own)
    trainer.train()
    logged = [
        (name, each["step"], each["epoch"])
        for each in trainer.state.log_history
        for name in ("loss", "eval_loss", "train_loss")
        if name in each
    ]
    return [logged, callback.seen, trainer.state.max_steps, trainer.state.num_train_epochs, trainer.state.epoch]


def places_of_the_job(folder: Path, how: dict[str, Any], *, notice_after: int) -> tuple[list[Any], int]:
    """The same for a job that gets a notice so many steps after each start. Also how often it has started."""
    for number in range(1, 20):
        with (
            suppress(Drained),
            spottrain.session(global_batch=4, micro_batch=3, checkpoint_uri=f"file://{folder}/commits") as session,
        ):
            return places(folder, SpottrainTrainer, how, notice_after=notice_after, session=session), number
    raise AssertionError("no end")
