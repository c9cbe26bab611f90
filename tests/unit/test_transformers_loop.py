"""The loop of Hugging Face's Trainer, on one rank."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn
from transformers import TrainingArguments

import spottrain
from spottrain.adapters.transformers import SpottrainTrainer
from spottrain.data.batch import BatchPlan

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


def train(folder: Path, steps: int) -> SpottrainTrainer:
    data = [{"x": torch.ones(4), "labels": torch.ones(())} for _ in range(8)]
    with spottrain.session(global_batch=1, micro_batch=1, checkpoint_uri=f"file://{folder}/checkpoints") as session:
        args = TrainingArguments(
            str(folder), max_steps=steps, use_cpu=True, report_to="none", include_num_input_tokens_seen="all"
        )
        trainer = SpottrainTrainer(session=session, model=Model(), args=args, train_dataset=data)
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
