"""One start of a script with a large model: where its seconds go, as JSON on stdout.

Run: python -m benchmarks.restart.rank URI --layers 64 --width 2048 [--usual] --threads 1
"""

from __future__ import annotations

import argparse
import json
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from unittest import mock

import torch
from torch import nn

import spottrain
from spottrain.checkpoint.saving.staging import StagingBuffer
from spottrain.recovery.restorer import StateRestorer
from spottrain_agent.zygote import PRELOADED_MODULES, preload

# More than any start of the benchmark makes.
TOTAL = 1000


class Timer:
    """Seconds by the name of a part, and those of the processors, which other work doesn't change much."""

    def __init__(self) -> None:
        self.seconds: dict[str, tuple[float, float]] = {}

    @contextmanager
    def part(self, name: str) -> Iterator[None]:
        started, worked = time.perf_counter(), time.process_time()
        yield
        waited, computed = self.seconds.get(name, (0.0, 0.0))
        self.seconds[name] = (
            waited + time.perf_counter() - started,
            computed + time.process_time() - worked,
        )

    def of(self, owner: type, method: str, name: str) -> None:
        """Count the time in a method."""
        original = getattr(owner, method)

        def timed(*args: object, **named: object) -> object:
            with self.part(name):
                return original(*args, **named)

        mock.patch.object(owner, method, timed).start()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("uri")
    parser.add_argument("--layers", type=int, required=True)
    parser.add_argument("--width", type=int, required=True)
    parser.add_argument("--threads", type=int, required=True)
    parser.add_argument("--usual", action="store_true", help="build the model without session.build")
    parser.add_argument("--commits", action="store_true", help="commit the step, as the first start does")
    args = parser.parse_args()
    preload(PRELOADED_MODULES)  # as the zygote has
    torch.set_num_threads(args.threads)
    timer = Timer()
    timer.of(StateRestorer, "resume", "load")
    timer.of(StagingBuffer, "prepare", "stage")

    def make() -> nn.Module:
        return nn.Sequential(*(nn.Linear(args.width, args.width, bias=False) for _ in range(args.layers)))

    with spottrain.session(strategy="ddp", global_batch=4, micro_batch=4, checkpoint_uri=args.uri) as session:
        with timer.part("build"):
            model = make() if args.usual else session.build(make)
        with timer.part("spread"):
            training = session.prepare(
                model,
                optimizer=lambda model: torch.optim.SGD(model.parameters(), lr=1e-3),
                dataset=[torch.randn(args.width) for _ in range(4)],
                num_workers=0,
            )
        for step in training.steps(total=TOTAL):
            with timer.part("first step"):
                for batch in step.micro_batches():
                    step.backward(training.model(batch).square().mean())
                step.update()
            print(json.dumps(timer.seconds), flush=True)
            if not args.commits:
                os._exit(0)
            break


if __name__ == "__main__":
    main()
