"""A training script that computes next to nothing.

It leaves room for an operator and a flood on a machine of two cores.
"""

from __future__ import annotations

import time

import torch

import spottrain

STEP_SECONDS = 0.1


def main() -> None:
    with spottrain.session() as session:
        training = session.prepare(
            torch.nn.Linear(4, 1),
            optimizer=lambda model: torch.optim.SGD(model.parameters(), lr=0.01),
            dataset=torch.utils.data.TensorDataset(torch.zeros(64, 4)),
        )
        for step in training.steps(total=1_000_000):
            time.sleep(STEP_SECONDS)
            for (inputs,) in step.micro_batches():
                step.backward(training.model(inputs).mean())
            step.update()


if __name__ == "__main__":
    main()
