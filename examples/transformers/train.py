"""Train a byte-level GPT-2 with Hugging Face's Trainer.

It trains on the sources of the Python standard library.

In a TrainingJob: see trainingjob.yaml. By hand: torchrun --nproc-per-node 2 examples/transformers/train.py --steps 50
"""

from __future__ import annotations

import argparse
import sysconfig
import tempfile
from pathlib import Path

import numpy as np
import torch
from transformers import GPT2Config, GPT2LMHeadModel, TrainingArguments

import spottrain
from spottrain.adapters.transformers import SpottrainTrainer


class StandardLibrary:
    """Windows of `context` bytes. The model shifts the labels itself."""

    def __init__(self, context: int) -> None:
        paths = sorted(Path(sysconfig.get_path("stdlib")).glob("*.py"))
        self._text = np.frombuffer(b"".join(path.read_bytes() for path in paths), dtype=np.uint8)
        self._context = context

    def __len__(self) -> int:
        return len(self._text) // self._context

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        window = torch.from_numpy(self._text[index * self._context : (index + 1) * self._context].astype(np.int64))
        return {"input_ids": window, "labels": window}


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--width", type=int, default=128)
    parser.add_argument("--context", type=int, default=64)
    parser.add_argument("--checkpoints", help="URI; only without an operator, if no job names one")
    args = parser.parse_args()

    with spottrain.session(global_batch=24, micro_batch=12, checkpoint_uri=args.checkpoints) as session:
        model = GPT2LMHeadModel(
            GPT2Config(
                vocab_size=256,
                n_positions=args.context,
                n_embd=args.width,
                n_layer=args.layers,
                n_head=4,
                bos_token_id=0,
                eos_token_id=0,
            )
        )
        trainer = SpottrainTrainer(
            session=session,
            model=model,
            args=TrainingArguments(
                output_dir=tempfile.gettempdir(),
                max_steps=args.steps,
                learning_rate=1e-3,
                lr_scheduler_type="cosine",
                warmup_steps=10,
                logging_steps=10,
                report_to="none",
                disable_tqdm=True,
                use_cpu=session.device.type == "cpu",
            ),
            train_dataset=StandardLibrary(args.context),
        )
        trainer.train()


if __name__ == "__main__":
    main()
