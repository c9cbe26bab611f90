"""A small job that goes wrong on demand, or just trains."""

from __future__ import annotations

import argparse
import time

import torch
from torch import nn
from torch.utils.data import TensorDataset

import spottrain


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=3)
    parser.add_argument("--step-seconds", type=float, default=0.0)
    parser.add_argument("--width", type=int, default=4, help="of the model: a checkpoint fits only one")
    parser.add_argument("--raise-at", type=int, default=0, help="raise in this step, counted from 1")
    parser.add_argument("--hang-at", type=int, help="wait for ever in this step; in 0, before the session")
    args = parser.parse_args()
    if args.hang_at == 0:
        time.sleep(3600)

    with spottrain.session() as session:
        training = session.prepare(
            nn.Linear(4, args.width),
            optimizer=lambda model: torch.optim.SGD(model.parameters(), lr=0.1),
            dataset=TensorDataset(torch.ones(64, 4)),
        )
        for number, step in enumerate(training.steps(total=args.steps), start=1):
            if number == args.raise_at:
                raise ValueError("the learning rate must be below 3, not 17")
            if number == args.hang_at:
                time.sleep(3600)
            for (batch,) in step.micro_batches():
                step.backward(training.model(batch).square().mean())
            time.sleep(args.step_seconds)
            step.update()


if __name__ == "__main__":
    main()
