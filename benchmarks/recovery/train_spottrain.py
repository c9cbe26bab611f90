"""The same training with spottrain: DDP, commits at the same interval."""

from __future__ import annotations

import os

import torch
from model import Vectors, build_model, log_step  # type: ignore[import-not-found]
from torch.nn.functional import mse_loss

import spottrain


def main() -> None:
    with spottrain.session() as session:
        training = session.prepare(
            build_model(),
            optimizer=lambda model: torch.optim.AdamW(model.parameters(), lr=1e-3),
            dataset=Vectors(),
            shuffle=False,
        )
        for step in training.steps(total=int(os.environ["NUM_STEPS"])):
            for inputs, targets in step.micro_batches():
                step.backward(mse_loss(training.model(inputs), targets))
            step.update()
            if session.rank == 0:
                log_step(step.number, session.world_size)


if __name__ == "__main__":
    main()
