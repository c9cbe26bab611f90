"""Train a classifier of handwritten digits with Accelerate.

The digits are scikit-learn's, and the training loop is the script's own.

In a TrainingJob: see trainingjob.yaml. By hand: python examples/accelerate/train.py
"""

from __future__ import annotations

import argparse

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
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--checkpoints", help="URI; only without an operator, if no job names one")
    args = parser.parse_args()

    digits = load_digits()
    images, labels = torch.tensor(digits.data, dtype=torch.float32) / 16, torch.tensor(digits.target)
    dataset = TensorDataset(images[:-NUM_TEST], labels[:-NUM_TEST])

    with spottrain.session(global_batch=50, micro_batch=25, checkpoint_uri=args.checkpoints) as session:
        accelerator = Accelerator(cpu=session.device.type == "cpu")
        model = nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Dropout(0.2), nn.Linear(128, 10))
        optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
        scheduler = warmup_cosine(total=args.steps, warmup=10)(optimizer)
        model, optimizer, scheduler = accelerator.prepare(model, optimizer, scheduler)
        loop = AcceleratedLoop(session, accelerator, model, optimizer, dataset, scheduler=scheduler, total=args.steps)
        for inputs, targets in loop.batches():
            with accelerator.accumulate(model):
                accelerator.backward(loop.weigh(functional.cross_entropy(model(inputs), targets)))
                optimizer.step()
                scheduler.step()
                optimizer.zero_grad()

        model.eval()
        with torch.no_grad():
            guesses = model(images[-NUM_TEST:].to(session.device)).argmax(dim=1).cpu()
        accuracy = (guesses == labels[-NUM_TEST:]).float().mean().item()
        if session.rank == 0:
            print(f"accuracy on {NUM_TEST} digits that were not trained on: {accuracy:.1%}", flush=True)


if __name__ == "__main__":
    main()
