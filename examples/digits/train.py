"""Train a classifier of handwritten digits, and evaluate it after each epoch.

The digits are scikit-learn's.

In a TrainingJob: see trainingjob.yaml. By hand: python examples/digits/train.py
"""

from __future__ import annotations

import argparse

import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.nn import functional
from torch.utils.data import TensorDataset

import spottrain

NUM_TEST = 297


class Classifier(nn.Module):
    """From images (batch, 1, 8, 8) to logits (batch, 10)."""

    def __init__(self) -> None:
        super().__init__()
        self.features = nn.Sequential(
            nn.Conv2d(1, 16, 3, padding=1), nn.ReLU(), nn.Conv2d(16, 32, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2)
        )
        self.classify = nn.Sequential(nn.Dropout(0.2), nn.Linear(32 * 4 * 4, 10))

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        return self.classify(self.features(images).flatten(1))


def accuracy_of(model: nn.Module, images: torch.Tensor, labels: torch.Tensor) -> float:
    """The part of the images (number, 1, 8, 8) whose label the model guesses."""
    model.eval()
    with torch.no_grad():
        guesses = model(images).argmax(dim=1).cpu()
    model.train()
    return (guesses == labels).float().mean().item()


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--epochs", type=int, default=10)
    parser.add_argument("--checkpoints", help="URI; only without an operator, if no job names one")
    args = parser.parse_args()

    digits = load_digits()
    images = torch.tensor(digits.images, dtype=torch.float32).unsqueeze(1) / 16
    labels = torch.tensor(digits.target)

    with spottrain.session(global_batch=50, micro_batch=25, checkpoint_uri=args.checkpoints) as session:
        training = session.prepare(
            Classifier(),
            optimizer=lambda model: torch.optim.Adam(model.parameters(), lr=2e-3),
            scheduler=lambda optimizer: torch.optim.lr_scheduler.StepLR(optimizer, step_size=5, gamma=0.5),
            scheduler_interval="epoch",
            dataset=TensorDataset(images[:-NUM_TEST], labels[:-NUM_TEST]),
        )
        for epoch in training.epochs(args.epochs):
            for step in epoch:
                for inputs, targets in step.micro_batches():
                    step.backward(functional.cross_entropy(training.model(inputs), targets))
                step.update()
            with training.evaluation():
                accuracy = accuracy_of(training.model, images[-NUM_TEST:].to(session.device), labels[-NUM_TEST:])
            if session.rank == 0:
                print(f"epoch {epoch.number + 1}: {accuracy:.1%} of {NUM_TEST} new digits are right", flush=True)


if __name__ == "__main__":
    main()
