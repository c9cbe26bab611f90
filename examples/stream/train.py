"""Train a byte-level transformer on documents that are read as streams, and packed to a context length.

In a TrainingJob: see trainingjob.yaml. By hand: python examples/stream/train.py
"""

from __future__ import annotations

import argparse

import torch
from data import Definitions
from torch import nn
from torch.nn import functional

import spottrain
from spottrain.data import Streams, causal_mask, packed

STREAMS = 8
CONTEXT = 128


class Block(nn.Module):
    """Attention inside of each document, and feed-forward."""

    def __init__(self, width: int, num_heads: int) -> None:
        super().__init__()
        self.num_heads = num_heads
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.project = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, x: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        heads = self.qkv(self.norm1(x)).unflatten(-1, (3, self.num_heads, -1))
        query, key, value = heads.permute(2, 0, 3, 1, 4)
        attended = functional.scaled_dot_product_attention(query, key, value, attn_mask=mask)
        x = x + self.project(attended.transpose(1, 2).flatten(2))
        return x + self.mlp(self.norm2(x))


class Transformer(nn.Module):
    """From packs of bytes to logits (batch, context, 256)."""

    def __init__(self, *, num_layers: int = 2, width: int = 64, num_heads: int = 4) -> None:
        super().__init__()
        self.tokens, self.positions = nn.Embedding(256, width), nn.Embedding(CONTEXT, width)
        self.blocks = nn.ModuleList(Block(width, num_heads) for _ in range(num_layers))
        self.head = nn.Linear(width, 256)

    def forward(self, pack: dict[str, torch.Tensor]) -> torch.Tensor:
        x = self.tokens(pack["tokens"]) + self.positions(pack["positions"])
        mask = causal_mask(pack["documents"])
        for block in self.blocks:
            x = block(x, mask)
        return self.head(x)


def make_stream(stream: int, number: int) -> object:
    return packed(Definitions(stream, number, streams=STREAMS), context=CONTEXT)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--checkpoints", help="URI; only without an operator, if no job names one")
    args = parser.parse_args()

    with spottrain.session(global_batch=16, micro_batch=16, checkpoint_uri=args.checkpoints) as session:
        training = session.prepare(
            Transformer(),
            optimizer=lambda model: torch.optim.AdamW(model.parameters(), lr=3e-3),
            dataset=Streams(make_stream, streams=STREAMS, window=32),
            tokens_per_sample=CONTEXT,
        )
        for step in training.steps(total=args.steps):
            for pack in step.micro_batches():
                logits = training.model(pack)
                step.backward(functional.cross_entropy(logits.flatten(0, 1), pack["labels"].flatten()))
            step.update()
            if step.number % 20 == 0:
                loss = training.step_loss()  # a collective, on all ranks
                if session.rank == 0:
                    print(f"step {step.number}: loss {loss:.3f}", flush=True)


if __name__ == "__main__":
    main()
