"""A small, fast job for rehearsals, with a perceptron.

It trains until a file appears, and then ends well.
"""

from __future__ import annotations

import argparse
import time
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional
from torch.utils.data import TensorDataset

import spottrain

NUM_SAMPLES, NUM_INPUTS, WIDTH = 4096, 32, 256
# Ranks ask for the file together, every few steps.
ASK_EVERY = 5


def is_over(path: Path) -> bool:
    """Whether rank 0 has seen the file; the same answer on all ranks."""
    seen = torch.tensor([float(path.exists())])
    if dist.is_initialized() and dist.get_world_size() > 1:
        dist.broadcast(seen, src=0)
    return bool(seen.item())


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--until", type=Path, required=True, help="train until this file exists")
    parser.add_argument("--step-seconds", type=float, default=0.2, help="what a step costs beside its computation")
    args = parser.parse_args()

    generator = torch.Generator().manual_seed(1)
    inputs = torch.randn(NUM_SAMPLES, NUM_INPUTS, generator=generator)
    targets = inputs.sin().sum(dim=1, keepdim=True)

    with spottrain.session() as session:
        model = nn.Sequential(nn.Linear(NUM_INPUTS, WIDTH), nn.ReLU(), nn.Linear(WIDTH, WIDTH), nn.ReLU())
        model.append(nn.Linear(WIDTH, 1))
        training = session.prepare(
            model,
            optimizer=lambda model: torch.optim.Adam(model.parameters(), lr=1e-3),
            dataset=TensorDataset(inputs, targets),
            tokens_per_sample=1,
        )
        for step in training.steps(total=1_000_000):
            if step.number % ASK_EVERY == 0 and is_over(args.until):
                break
            for batch, wanted in step.micro_batches():
                step.backward(functional.mse_loss(training.model(batch), wanted))
            time.sleep(args.step_seconds)
            step.update()


if __name__ == "__main__":
    main()
