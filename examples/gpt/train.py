"""Train a byte-level GPT on the sources of the Python standard library.

In a TrainingJob: see trainingjob.yaml. By hand: torchrun --nproc-per-node 2 examples/gpt/train.py --steps 50
"""

from __future__ import annotations

import argparse

import torch
from data import StandardLibrary
from model import Block, Gpt
from torch.nn import functional

import spottrain


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=400)
    parser.add_argument("--layers", type=int, default=6)
    parser.add_argument("--width", type=int, default=192)
    parser.add_argument("--heads", type=int, default=6)
    parser.add_argument("--context", type=int, default=64)
    parser.add_argument("--checkpoints", help="URI; only without an operator, if no job names one")
    args = parser.parse_args()

    with spottrain.session(
        global_batch=24, micro_batch=12, strategy="fsdp", checkpoint_uri=args.checkpoints
    ) as session:
        training = session.prepare(
            Gpt(num_layers=args.layers, width=args.width, num_heads=args.heads, context=args.context),
            optimizer=lambda model: torch.optim.AdamW(model.parameters(), lr=1e-3, betas=(0.9, 0.95)),
            scheduler=lambda optimizer: torch.optim.lr_scheduler.LinearLR(optimizer, 0.1, total_iters=20),
            wrap={Block},
            dataset=StandardLibrary(args.context),
            clip_grad_norm=1.0,
            tokens_per_sample=args.context,
        )
        for step in training.steps(total=args.steps):
            for inputs, targets in step.micro_batches():
                logits = training.model(inputs)
                step.backward(functional.cross_entropy(logits.flatten(0, 1), targets.flatten()))
            step.update()
            if step.number % 10 == 0:
                loss = training.step_loss()  # a collective, on all ranks
                if session.rank == 0:
                    print(f"step {step.number}: loss {loss:.3f}", flush=True)


if __name__ == "__main__":
    main()
