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
from torch.utils.data import TensorDataset

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

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.Adam(self.parameters(), lr=2e-3)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--checkpoints", help="URI; only without an operator, if no job names one")
    args = parser.parse_args()

    digits = load_digits()
    images, labels = torch.tensor(digits.data, dtype=torch.float32) / 16, torch.tensor(digits.target)

    with spottrain.session(global_batch=50, micro_batch=25, checkpoint_uri=args.checkpoints) as session:
        strategy = SpottrainStrategy(session, TensorDataset(images[:-NUM_TEST], labels[:-NUM_TEST]))
        trainer = lightning.Trainer(
            max_steps=args.steps,
            strategy=strategy,
            callbacks=[SpottrainCallback(strategy)],
            logger=False,
            enable_checkpointing=False,
            enable_progress_bar=False,
            enable_model_summary=False,
            **strategy.placement,
        )
        module = Classifier()
        trainer.fit(module, strategy.batches)

        module.eval()
        with torch.no_grad():
            guesses = module.layers(images[-NUM_TEST:].to(module.device)).argmax(dim=1).cpu()
        accuracy = (guesses == labels[-NUM_TEST:]).float().mean().item()
        if session.rank == 0:
            print(f"accuracy on {NUM_TEST} digits that were not trained on: {accuracy:.1%}", flush=True)


if __name__ == "__main__":
    main()
