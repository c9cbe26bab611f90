"""A small job in the loop of Hugging Face's Trainer.

It trains until a file appears, and then ends well.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional
from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments

import spottrain
from spottrain.adapters.transformers import SpottrainTrainer

NUM_SAMPLES, NUM_INPUTS = 4096, 32


class Perceptron(nn.Module):
    """From (batch, 32) to the mean loss, as models of Hugging Face return it."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(NUM_INPUTS, 64), nn.ReLU(), nn.Linear(64, 1))

    def forward(self, x: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
        return {"loss": functional.mse_loss(self.layers(x).squeeze(1), labels)}


class Until(TrainerCallback):
    """Stops training, on all ranks, once rank 0 has seen the file."""

    def __init__(self, path: Path, step_seconds: float) -> None:
        self._path = path
        self._step_seconds = step_seconds

    def on_step_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any) -> None:
        time.sleep(self._step_seconds)
        seen = torch.tensor([float(self._path.exists())])
        dist.broadcast(seen, src=0)
        control.should_training_stop = bool(seen)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--until", type=Path, required=True, help="train until this file exists")
    parser.add_argument("--step-seconds", type=float, default=0.2, help="what a step costs beside its computation")
    args = parser.parse_args()

    inputs = torch.randn(NUM_SAMPLES, NUM_INPUTS, generator=torch.Generator().manual_seed(1))
    targets = inputs.sin().sum(dim=1)
    with spottrain.session() as session:
        trainer = SpottrainTrainer(
            session=session,
            model=Perceptron(),
            args=TrainingArguments(
                output_dir=tempfile.gettempdir(),
                max_steps=1_000_000,
                logging_steps=50,
                report_to="none",
                disable_tqdm=True,
                use_cpu=session.device.type == "cpu",
            ),
            train_dataset=[{"x": x, "labels": y} for x, y in zip(inputs, targets, strict=True)],
            callbacks=[Until(args.until, args.step_seconds)],
        )
        trainer.train()


if __name__ == "__main__":
    main()
