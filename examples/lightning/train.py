"""Train a classifier of handwritten digits (scikit-learn's) with Lightning.

In a TrainingJob: see trainingjob.yaml. By hand: python examples/lightning/train.py
"""

from __future__ import annotations

import argparse

import lightning.pytorch as lightning
import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.nn import functional
from torch.utils.data import DataLoader, TensorDataset

import spottrain
from spottrain.adapters.lightning import SpottrainCallback, SpottrainStrategy

NUM_TEST = 297


class Classifier(lightning.LightningModule):
    """From images (batch, 64) to logits (batch, 10)."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Dropout(0.2), nn.Linear(128, 10))

    def training_step(self, batch: tuple[torch.Tensor, torch.Tensor], batch_idx: int) -> torch.Tensor:
        images, labels = batch
        return functional.cross_entropy(self.layers(images), labels)

    def validation_step(self, batch: tuple[torch.Tensor, torch.Tensor], batch_idx: int) -> None:
        images, labels = batch
        self.log("accuracy", (self.layers(images).argmax(dim=1) == labels).float().mean(), sync_dist=True)

    def on_validation_epoch_end(self) -> None:
        epoch, accuracy = self.current_epoch + 1, self.trainer.callback_metrics["accuracy"].item()
        self.trainer.print(f"epoch {epoch}: {accuracy:.1%} of {NUM_TEST} new digits are right", flush=True)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.Adam(self.parameters(), lr=2e-3)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--epochs", type=int, default=10)
    parser.add_argument("--checkpoints", help="URI; only without an operator, if no job names one")
    args = parser.parse_args()

    digits = load_digits()
    images, labels = torch.tensor(digits.data, dtype=torch.float32) / 16, torch.tensor(digits.target)

    with spottrain.session(global_batch=50, micro_batch=25, checkpoint_uri=args.checkpoints) as session:
        strategy = SpottrainStrategy(session, TensorDataset(images[:-NUM_TEST], labels[:-NUM_TEST]))
        trainer = lightning.Trainer(
            max_epochs=args.epochs,
            num_sanity_val_steps=0,
            strategy=strategy,
            callbacks=[SpottrainCallback(strategy)],
            logger=False,
            enable_checkpointing=False,
            enable_progress_bar=False,
            enable_model_summary=False,
            **strategy.placement,
        )
        test = DataLoader(TensorDataset(images[-NUM_TEST:], labels[-NUM_TEST:]), batch_size=NUM_TEST)
        trainer.fit(Classifier(), strategy.batches, test)


if __name__ == "__main__":
    main()
