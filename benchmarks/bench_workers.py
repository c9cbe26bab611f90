"""Seconds of a step by the number of data workers.

The samples are cheap, fetched, or computed.

Run: python -m benchmarks.bench_workers [--steps 60]

One rank, one sample a step, and a step that computes for 20 ms on an accelerator (here it sleeps). "default" is what
a script gets that sets nothing. The first steps, in which workers start, don't count.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from contextlib import closing
from dataclasses import dataclass
from statistics import median

import torch

from benchmarks import clean_up_on_sigterm
from spottrain.data.batch import BatchPlan
from spottrain.data.batches import Batches
from spottrain.data.loader import Data, load_batches
from spottrain.data.order import Permutation

STEP_SECONDS = SAMPLE_SECONDS = 0.02
NUM_WARM_UP = 10
NUM_SAMPLES = 1000


@dataclass(frozen=True, slots=True)
class Samples:
    """A data set that produces every sample in the same way."""

    get: Callable[[], None]

    def __len__(self) -> int:
        return NUM_SAMPLES

    def __getitem__(self, index: int) -> torch.Tensor:
        self.get()
        return torch.full((1024,), float(index))


def compute() -> None:
    ends = time.thread_time() + SAMPLE_SECONDS
    while time.thread_time() < ends:
        pass


KINDS = {
    "in memory": lambda: None,
    "20 ms of waiting (a store)": lambda: time.sleep(SAMPLE_SECONDS),
    "20 ms of computing (decoding)": compute,
}
WORKERS = (0, None, 1, 2)


def main() -> None:
    clean_up_on_sigterm()
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=60)
    args = parser.parse_args()
    print("| a sample | workers | ms a step | of these, waiting for data |")
    print("|---|---|---|---|")
    for kind, get in KINDS.items():
        for num_workers in WORKERS:
            whole, waited = measure(Samples(get), num_workers, args.steps)
            name = "default" if num_workers is None else num_workers
            print(f"| {kind} | {name} | {1000 * whole:.1f} | {1000 * waited:.1f} |", flush=True)


def measure(samples: Samples, num_workers: int | None, num_steps: int) -> tuple[float, float]:
    """Return the medians of the seconds of a step, and of its wait for data."""
    whole, waited = [], []
    batches = load_batches(
        Data(samples, num_workers=num_workers),
        Batches(Permutation(num_samples=NUM_SAMPLES), global_batch=1),
        BatchPlan(global_batch=1, micro_batch=1, world_size=1),
        rank=0,
        first_step=0,
        device=torch.device("cpu"),
    )
    with closing(batches):
        for _ in range(NUM_WARM_UP + num_steps):
            started = time.monotonic()
            next(batches)
            time.sleep(STEP_SECONDS)
            whole.append(time.monotonic() - started)
            waited.append(batches.pop_wait())
    return median(whole[NUM_WARM_UP:]), median(waited[NUM_WARM_UP:])


if __name__ == "__main__":
    main()
