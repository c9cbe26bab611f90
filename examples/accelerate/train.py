"""Train a classifier of handwritten digits with Accelerate.

The digits are scikit-learn's, and the loop over epochs is the script's own.

In a TrainingJob: see trainingjob.yaml. By hand: python examples/accelerate/train.py
"""

from __future__ import annotations

import argparse
import math

import torch
from accelerate import Accelerator
from sklearn.datasets import load_digits
from torch import nn
from torch.nn import functional
from torch.utils.data import TensorDataset

import spottrain
from spottrain.adapters.accelerate import AcceleratedLoop
from spottrain.schedules import warmup_cosine

NUM_TEST = 297


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--epochs", type=int, default=10)
    parser.add_argument("--checkpoints", help="URI; only without an operator, if no job names one")
    args = parser.parse_args()

    digits = load_digits()
    images, labels = torch.tensor(digits.data, dtype=torch.float32) / 16, torch.tensor(digits.target)
    dataset = TensorDataset(images[:-NUM_TEST], labels[:-NUM_TEST])

    with spottrain.session(global_batch=50, micro_batch=25, checkpoint_uri=args.checkpoints) as session:
        accelerator = Accelerator(cpu=session.device.type == "cpu")
        model = nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Dropout(0.2), nn.Linear(128, 10))
        optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
        steps = args.epochs * math.ceil(len(dataset) / session.batch_plan.global_batch)
        scheduler = warmup_cosine(total=steps, warmup=10)(optimizer)
        model, optimizer, scheduler = accelerator.prepare(model, optimizer, scheduler)
        loop = AcceleratedLoop(
            session, accelerator, model, optimizer, dataset, scheduler=scheduler, epochs=args.epochs
        )
        for epoch in loop.epochs():
            model.train()
            for inputs, targets in epoch:
                with accelerator.accumulate(model):
                    accelerator.backward(loop.weigh(functional.cross_entropy(model(inputs), targets)))
                    optimizer.step()
                    scheduler.step()
                    optimizer.zero_grad()

            model.eval()
            with loop.evaluation(), torch.no_grad():
                guesses = model(images[-NUM_TEST:].to(session.device)).argmax(dim=1).cpu()
            accuracy = (guesses == labels[-NUM_TEST:]).float().mean().item()
            if session.rank == 0:
                print(f"epoch {epoch.number + 1}: {accuracy:.1%} of {NUM_TEST} new digits are right", flush=True)


if __name__ == "__main__":
    main()
