"""Train a classifier of handwritten digits, and evaluate it at the end.

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


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--checkpoints", help="URI; only without an operator, if no job names one")
    args = parser.parse_args()

    digits = load_digits()
    images = torch.tensor(digits.images, dtype=torch.float32).unsqueeze(1) / 16
    labels = torch.tensor(digits.target)

    with spottrain.session(global_batch=50, micro_batch=25, checkpoint_uri=args.checkpoints) as session:
        training = session.prepare(
            Classifier(),
            optimizer=lambda model: torch.optim.Adam(model.parameters(), lr=2e-3),
            dataset=TensorDataset(images[:-NUM_TEST], labels[:-NUM_TEST]),
        )
        for step in training.steps(total=args.steps):
            for inputs, targets in step.micro_batches():
                step.backward(functional.cross_entropy(training.model(inputs), targets))
            step.update()

        training.model.eval()
        with torch.no_grad():
            guesses = training.model(images[-NUM_TEST:].to(session.device)).argmax(dim=1).cpu()
        accuracy = (guesses == labels[-NUM_TEST:]).float().mean().item()
        if session.rank == 0:
            print(f"accuracy on {NUM_TEST} digits that were not trained on: {accuracy:.1%}", flush=True)


if __name__ == "__main__":
    main()
